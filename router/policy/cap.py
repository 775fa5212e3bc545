"""The load cap: how far over its pool's mean a replica may be and still take more."""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from router.policy.values import Ask, Candidate

FLOOR_TOKENS: Final = 256
"""Prefill work that is never too much: one chunk of the engine."""

Measure: TypeAlias = Callable[[Candidate], float]


def prefill_measure(candidate: Candidate) -> float:
    """Return the time until booked prefills are done, s."""
    return candidate.load.prefill_s


def decode_measure(candidate: Candidate) -> float:
    """Return the decode load for its capacity, in sequences."""
    return candidate.load.decode / candidate.weight


def prefill_cap_s(pool: Sequence[Candidate], epsilon: float) -> float:
    """Return the booked prefill time up to which a replica of the pool may take more, s."""
    fastest = max((c.prefill_tokens_per_s for c in pool), default=1.0)
    return _cap(pool, prefill_measure, floor=FLOOR_TOKENS / fastest, epsilon=epsilon)


def decode_cap(pool: Sequence[Candidate], ask: Ask) -> float:
    """Return the decode load up to which a replica of the pool may take more, in sequences for weight 1."""
    return _cap(pool, decode_measure, floor=ask.load.decode, epsilon=ask.epsilon)


def _cap(pool: Sequence[Candidate], measure: Measure, *, floor: float, epsilon: float) -> float:
    weight = sum(c.weight for c in pool)
    if not weight:
        return floor
    # The least loaded replica is never above the mean, so with this cap someone is always free to take more.
    mean = sum(c.weight * measure(c) for c in pool) / weight
    return max(floor, (1 + epsilon) * mean)
