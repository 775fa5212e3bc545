"""Loads: pages of a prompt's prefix on their way from a lower tier into the cache.

A load reads into pages of its own and pins the prefix before them. What was read and verified is cached when it ends,
and the jobs that waited go on as if it had been there before. A job that was cancelled meanwhile changes nothing: no
page under a read is ever reused.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvrelay.engine.jobs import Job, Phase
from kvrelay.engine.parts import Parts
from kvrelay.engine.pool import PageState
from kvrelay.engine.protocol import TierLoad
from kvrelay.engine.sequence import Sequence
from kvrelay.kv.load_times import LoadTimes, Source
from kvrelay.kv.tiers.tier import PageKeys
from kvrelay.kv.tiers.worker import Loaded, TierWorker

PATIENCE: Final = 4.0
PATIENCE_MIN_S: Final = 1.0
"""Jobs wait for a load four times as long as it was predicted to take, and a second more; then they compute."""


@dataclass(slots=True, eq=False, kw_only=True)
class Load:
    """A run of pages of one chain.

    Attributes:
        wanted: names of the pages.
        prefix: pages before them, pinned.
        pages: pages they are read into, in order.
        patience_ends_at_s: when jobs stop waiting.
        predicted_s: how long it should take.
        jobs: who waits, and what happens to each when it is over.
    """

    wanted: list[PageKeys]
    prefix: list[int]
    pages: list[int]
    patience_ends_at_s: float
    predicted_s: float
    jobs: list[tuple[Job, Callable[[], None]]] = field(default_factory=list)


class TierLoads:
    """Begins and ends loads.

    Args:
        worker: reads the pages.
        parts: of the engine whose pool they are read into.
        page_at: maps a page to its bytes.
        page_bytes: how many they are.
    """

    def __init__(
        self, worker: TierWorker, parts: Parts, *, page_at: Callable[[int], memoryview], page_bytes: int
    ) -> None:
        self._worker = worker
        self._parts = parts
        self._page_at = page_at
        self._page_bytes = page_bytes
        self._times = LoadTimes(clock=parts.clock)
        self._source: Source = ("", worker.tier.name)
        self._numbers = itertools.count(1)
        self._loads: dict[int, Load] = {}

    @property
    def busy(self) -> bool:
        """True while pages are being read."""
        return bool(self._loads)

    @property
    def pinned(self) -> list[int]:
        """Pages that have a reference of ours."""
        return [page for load in self._loads.values() for page in (*load.prefix, *load.pages)]

    def begin(self, job: Job, then: Callable[[], None]) -> bool:
        """Have what the tier holds of a job's prefix loaded, if that is faster than computing it and there is room.

        Returns False when nothing is to be loaded. Otherwise the job is LOADING, and `then` is called, which gives it
        another phase, unless it has ended by then. A job is asked for once.
        """
        if job.tier_asked:
            return False
        prefix, wanted = self._missing(job.sequence)
        if not wanted:
            return False
        load = self._under_way(wanted[0])
        if load is None:
            wanted = wanted[: self._room(prefix)]
            if not wanted or self._stuck:
                return False
            job.tier_asked = True
            load = self._start(prefix, wanted)
            if load is None:
                return False
        job.tier_asked = True
        job.phase = Phase.LOADING
        load.jobs.append((job, then))
        return True

    def end(self, result: Loaded) -> None:
        """Cache what was read, free what was not, and have the jobs go on."""
        load = self._loads.pop(result.load_id)
        for page, keys in zip(load.pages[: result.pages], load.wanted, strict=False):
            self._parts.cache.insert(page, keys.keys, parent=keys.parent)
        self._release(load.prefix, load.pages)
        whole = result.pages == len(load.pages)
        if whole:
            self._times.learn(self._source, result.pages * self._page_bytes, result.elapsed_s)
        self._tell("loaded" if whole else "failed", result.pages, load.predicted_s, result.elapsed_s)
        self._go_on(load)

    def give_up(self) -> None:
        """Have jobs go on whose load takes too long; its pages stay pinned until it ends."""
        now_s = self._parts.clock()
        for load in self._loads.values():
            if load.jobs and now_s > load.patience_ends_at_s:
                self._go_on(load)

    # ------------------------------------------------------------ inside

    def _missing(self, sequence: Sequence) -> tuple[list[int], list[PageKeys]]:
        """Return the pages of the prefix that are cached, and the names of those after them that the tier holds."""
        prefix = self._parts.tables.match(sequence)
        wanted: list[PageKeys] = []
        for keys in self._parts.tables.page_keys(sequence, len(prefix)):
            if not self._worker.tier.contains(keys.name):
                break
            wanted.append(keys)
        return prefix, wanted

    def _under_way(self, first: PageKeys) -> Load | None:
        return next((load for load in self._loads.values() if load.jobs and load.wanted[0] == first), None)

    def _room(self, prefix: list[int]) -> int:
        """Return how many pages can be read into while the prefix is pinned."""
        idle = sum(self._parts.pool.state(page) == PageState.CACHED for page in prefix)
        return max(self._parts.pool.available - idle, 0)

    @property
    def _stuck(self) -> bool:
        """True while the tier is busy with a load that nobody waits for any more."""
        return any(not load.jobs for load in self._loads.values())

    def _start(self, prefix: list[int], wanted: list[PageKeys]) -> Load | None:
        predicted_s = self._times.predict(self._source, len(wanted) * self._page_bytes)
        size = self._parts.tables.page_tokens
        start, end = len(prefix) * size, (len(prefix) + len(wanted)) * size
        if predicted_s >= self._parts.speed.compute_s(start, end, chunk_tokens=self._parts.chunk_tokens):
            self._tell("computed", len(wanted), predicted_s, 0.0)
            return None
        for page in prefix:
            self._parts.pool.acquire(page)
        reserved = self._parts.pool.reserve(len(wanted))
        assert reserved
        pages = [self._parts.cache.allocate() for _ in wanted]
        load_id = next(self._numbers)
        memory = [(keys, self._page_at(page)) for keys, page in zip(wanted, pages, strict=True)]
        if not self._worker.get(load_id, memory):
            self._release(prefix, pages)
            return None
        self._loads[load_id] = Load(
            wanted=wanted,
            prefix=prefix,
            pages=pages,
            patience_ends_at_s=self._parts.clock() + PATIENCE_MIN_S + PATIENCE * predicted_s,
            predicted_s=predicted_s,
        )
        return self._loads[load_id]

    def _release(self, prefix: list[int], pages: list[int]) -> None:
        # From the end, so that children are reused before their parents.
        for page in (*reversed(pages), *reversed(prefix)):
            self._parts.pool.release(page)

    def _tell(self, choice: str, pages: int, expected_s: float, elapsed_s: float) -> None:
        self._parts.emit(
            TierLoad(
                tier=self._worker.tier.name,
                choice=choice,
                tokens=pages * self._parts.tables.page_tokens,
                bytes=pages * self._page_bytes,
                expected_s=expected_s,
                elapsed_s=elapsed_s,
            )
        )

    def _go_on(self, load: Load) -> None:
        for job, then in load.jobs:
            if self._parts.jobs.get(job.job_id) is job and job.phase is Phase.LOADING:
                then()
        load.jobs.clear()
