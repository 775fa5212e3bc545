"""How long loading a prefix takes, by where it lies: measured for each source, and guessed before. Pure.

A source is a replica and the tier that its blocks lie in. A load costs a fixed time (the lease, the verdict, turns in
two engines) and a time per byte; both are fitted to the loads that were made. Measurements fade with time, so that a
source that was slow once, and is therefore avoided, is tried again when its last measurement means little.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvrelay.kv.fit import Fit

PRIOR_CALLS_S: Final = 0.010
"""Fixed time of a load before any was made: two calls and their turns in two engines' loops."""

PRIOR_BYTES_PER_S: Final = 1e9
"""Rate before any was measured: TCP between two hosts, rounded down; shared memory and RDMA are faster."""

USUAL_BYTES: Final = 16e6
"""A prefix of ordinary size: some hundred tokens of a small model."""

HALF_LIFE_S: Final = 30.0
"""A measurement weighs half as much after this time: a stall is forgotten within minutes."""

SOURCES_MAX: Final = 4096
"""Sources kept, the last used ones; more than a fleet has."""

Source: TypeAlias = tuple[str, str]
"""Replica id and tier."""


@dataclass(slots=True)
class _Measured:
    fit: Fit
    at_s: float


class LoadTimes:
    """Predicts load times and learns from them; `clock` tells monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sources: OrderedDict[Source, _Measured] = OrderedDict()

    def predict(self, source: Source, size_bytes: int) -> float:
        """Return how long loading so many bytes from a source is expected to take, s."""
        return self._aged(source).predict((1.0, size_bytes))

    def learn(self, source: Source, size_bytes: int, elapsed_s: float) -> None:
        """Take note of a load, or of one that was given up after `elapsed_s`."""
        self._aged(source).add((1.0, size_bytes), elapsed_s)

    def _aged(self, source: Source) -> Fit:
        now_s = self._clock()
        known = self._sources.pop(source, None)
        if known is None:
            known = _Measured(Fit(prior=(PRIOR_CALLS_S, 1 / PRIOR_BYTES_PER_S), usual=(1.0, USUAL_BYTES)), now_s)
        known.fit.fade(0.5 ** ((now_s - known.at_s) / HALF_LIFE_S))
        known.at_s = now_s
        self._sources[source] = known
        if len(self._sources) > SOURCES_MAX:
            self._sources.popitem(last=False)
        return known.fit
