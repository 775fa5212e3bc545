"""Pairs of a decode replica with a prefill replica, or alone, for policies that rank the two sides separately."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from router.policy import decider
from router.policy.cost import local_cost, remote_cost
from router.policy.values import RANKED_MAX, Ask, Candidate, Candidates, Choice


def pair_up(ask: Ask, decoders: Sequence[Candidate], readers: Sequence[Candidate], reason: str) -> list[Choice]:
    """Return pairs of ranked decode replicas with ranked prefill replicas; the decider says remote or local.

    The best decode replica comes first, with every prefill replica it may ask; then the others, each with its best.
    """
    choices: list[Choice] = []
    for rank, decode in enumerate(decoders[:RANKED_MAX]):
        others = [reader for reader in readers if reader.peer.replica_id != decode.peer.replica_id]
        choices += decided(ask, decode, others if rank == 0 else others[:1])
    return [choice.because(reason) for choice in choices[:RANKED_MAX]]


def decided(ask: Ask, decode: Candidate, readers: Sequence[Candidate]) -> list[Choice]:
    """Return the pairs of one decode replica, best first, as the decider wants it: all remote, or the local one."""
    local = local_cost(ask, decode)
    remotes = [(reader, remote_cost(ask, decode, reader)) for reader in readers]
    best = remotes[0][1] if remotes else None
    if best is None or not decider.remote_wins(ask, local, best):
        why = decider.why(ask, decode, local, best, is_remote=False)
        return [Choice(decode=decode, prefill=None, cost=local, rival=best, decider_reason=why)]
    why = decider.why(ask, decode, local, best, is_remote=True)
    return [Choice(decode=decode, prefill=p, cost=cost, rival=local, decider_reason=why) for p, cost in remotes]


def with_holder(choice: Choice, candidates: Candidates, rng: Random) -> Choice:
    """Name the replica that holds the most of the prefix, when it holds more than the one that reads it.

    Of several, the decode replica of the pair: it keeps its prefix for this request, the others might not.
    """
    most = max(c.held_tokens for c in candidates.everyone())
    if most <= choice.reader.held_tokens:
        return choice
    if choice.decode.held_tokens == most:
        return replace(choice, holder=choice.decode)
    return replace(choice, holder=rng.choice([c for c in candidates.everyone() if c.held_tokens == most]))
