"""Policy `prefix_aware`: the pair that is predicted to answer soonest, among those under the load cap."""

from collections.abc import Sequence
from random import Random
from typing import Final

from router.policy import decider
from router.policy.cap import Measure, decode_cap, decode_measure, prefill_cap_s, prefill_measure
from router.policy.cost import local_cost, remote_cost
from router.policy.least_loaded import least_loaded
from router.policy.pairs import with_holder
from router.policy.values import RANKED_MAX, Ask, Candidate, Candidates, Choice, Cost, Disaggregate

HOLDERS_MAX: Final = 4
"""Holders of the longest prefixes that are scored on each side."""

IDLEST_MAX: Final = 4
"""Least loaded replicas that are scored on each side beside the holders."""

TIE_SHARE: Final = 0.1
"""Predictions nearer than this to the best, as a share of it, count as equal: they are not more exact than that."""

TIE_S: Final = 0.005
"""The same in s, for predictions near zero."""


def prefix_aware(ask: Ask, candidates: Candidates, rng: Random) -> list[Choice]:
    """Score decode replicas with prefill replicas and alone, jointly, and rank them."""
    decoders, readers = candidates.decoders, candidates.readers()
    free_decoders = _below(decoders, decode_measure, decode_cap(decoders, ask))
    free_readers = _below(readers, prefill_measure, prefill_cap_s(readers, ask.epsilon))
    local_cap_s = prefill_cap_s(decoders, ask.epsilon)
    asked = _shortlist(free_readers, prefill_measure, rng)
    choices = [
        choice
        for decode in _shortlist(free_decoders, decode_measure, rng)
        for choice in _pairs(ask, decode, asked)
        if choice.prefill or prefill_measure(decode) <= local_cap_s
    ]
    if not choices:
        return _overloaded(ask, candidates, rng)
    ranked = _ranked(choices, rng)
    reason = _reason(ranked[0], candidates, Candidates(tuple(free_decoders), tuple(free_readers)))
    return [with_holder(choice.because(reason), candidates, rng) for choice in ranked[:RANKED_MAX]]


def _overloaded(ask: Ask, candidates: Candidates, rng: Random) -> list[Choice]:
    """Nobody is under the cap: take the least loaded."""
    choices = [c.because("overloaded") for c in least_loaded(ask, candidates, rng)]
    return [with_holder(choice, candidates, rng) for choice in choices]


# ---------------------------------------------------------------- filter


def _below(pool: Sequence[Candidate], measure: Measure, cap: float) -> list[Candidate]:
    return [candidate for candidate in pool if measure(candidate) <= cap]


def _shortlist(pool: Sequence[Candidate], measure: Measure, rng: Random) -> list[Candidate]:
    """Return those that hold the most of the prefix, and the least loaded; equals are drawn at random."""

    def rank(candidate: Candidate) -> tuple[float, float]:
        return measure(candidate), rng.random()

    holders = sorted((c for c in pool if c.held_tokens), key=lambda c: (-c.held_tokens, rank(c)))[:HOLDERS_MAX]
    chosen = {c.peer.replica_id for c in holders}
    return holders + sorted((c for c in pool if c.peer.replica_id not in chosen), key=rank)[:IDLEST_MAX]


# ---------------------------------------------------------------- score


def _pairs(ask: Ask, decode: Candidate, readers: Sequence[Candidate]) -> list[Choice]:
    """Return the pairs of one decode replica that `--disaggregate` allows."""
    local = local_cost(ask, decode)
    remotes = []
    if ask.disaggregate is not Disaggregate.NEVER:
        others = (reader for reader in readers if reader.peer.replica_id != decode.peer.replica_id)
        remotes = [(reader, remote_cost(ask, decode, reader)) for reader in others]
    best = min((cost for _, cost in remotes), key=lambda cost: cost.total_s, default=None)
    choices = [_choice(ask, decode, reader, cost, local) for reader, cost in remotes]
    if ask.disaggregate is not Disaggregate.ALWAYS or not choices:
        choices.append(_choice(ask, decode, None, local, best))
    return choices


def _choice(ask: Ask, decode: Candidate, prefill: Candidate | None, cost: Cost, rival: Cost | None) -> Choice:
    local, remote = (cost, rival) if prefill is None else (rival, cost)
    assert local is not None
    why = decider.why(ask, decode, local, remote, is_remote=prefill is not None)
    return Choice(decode=decode, prefill=prefill, cost=cost, rival=rival, decider_reason=why, capped=True)


# ---------------------------------------------------------------- pick


def _ranked(choices: list[Choice], rng: Random) -> list[Choice]:
    """Sort by cost; of those as good as the best and equal to it otherwise, the least loaded first, then at random."""
    best = min(choices, key=lambda choice: choice.cost.total_s)
    bound_s = best.cost.total_s * (1 + TIE_SHARE) + TIE_S

    def rank(choice: Choice) -> tuple[bool, float, float, float, float]:
        tied = choice.cost.total_s <= bound_s and _kind(choice) == _kind(best)
        cost_s = 0.0 if tied else choice.cost.total_s
        return not tied, cost_s, decode_measure(choice.decode), prefill_measure(choice.reader), rng.random()

    return sorted(choices, key=rank)


def _kind(choice: Choice) -> tuple[bool, int, int]:
    return choice.prefill is None, choice.decode.held_tokens, choice.reader.held_tokens


def _reason(chosen: Choice, candidates: Candidates, free: Candidates) -> str:
    most = max(c.held_tokens for c in candidates.everyone())
    if most == 0:
        return "cold"
    if max(chosen.decode.held_tokens, chosen.reader.held_tokens) == most:
        return "prefix"
    # Someone that holds it all may still take more: it was left out because another answers sooner.
    return "sooner" if any(c.held_tokens == most for c in free.everyone()) else "spill"
