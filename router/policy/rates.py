"""Predicted speeds of replicas from what they measured."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

PREFILL_TOKENS_PER_S: Final = 400.0
"""Used while nobody has measured: one CPU core with a model of 135 million parameters."""

STEP_S: Final = 0.05
"""Decode step, used while nobody has measured: the same machine."""

OWN_SHARE: Final = 0.25
"""Weight of a replica's own measurement against its pool's median. A heartbeat tells one number without its spread;
with more weight, noise alone would send all cold requests to whoever measured a lucky one."""

SPREAD_MAX: Final = 2.0
"""A replica is never taken for more than this times faster or slower than its pool's median."""


def predicted(measured: Sequence[float], default: float) -> list[float]:
    """Return one rate a replica, in the order of `measured` (0: not measured yet), all of one pool and unit."""
    known = _positive(measured)
    middle = median(known) if known else default
    return [_shrunk(rate, middle) if rate > 0 else middle for rate in measured]


def _positive(rates: Iterable[float]) -> list[float]:
    return [rate for rate in rates if rate > 0]


def _shrunk(own: float, middle: float) -> float:
    mixed = OWN_SHARE * own + (1 - OWN_SHARE) * middle
    return min(max(mixed, middle / SPREAD_MAX), middle * SPREAD_MAX)
