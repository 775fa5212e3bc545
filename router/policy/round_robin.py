"""Policy `round_robin`: one after the other."""

from collections.abc import Sequence
from random import Random

from router.policy.pairs import pair_up
from router.policy.values import Ask, Candidate, Candidates, Choice


def round_robin(ask: Ask, candidates: Candidates, rng: Random) -> list[Choice]:  # noqa: ARG001 - the policies' signature
    """Choose the next of each side by the request's number."""
    return pair_up(ask, _from_turn(candidates.decoders, ask.turn), _from_turn(candidates.readers(), ask.turn), "turn")


def _from_turn(pool: Sequence[Candidate], turn: int) -> list[Candidate]:
    ordered = sorted(pool, key=lambda c: c.peer.replica_id)
    start = turn % len(ordered) if ordered else 0
    return ordered[start:] + ordered[:start]
