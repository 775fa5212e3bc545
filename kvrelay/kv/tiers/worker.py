"""The one thread that reads and writes a tier, so that whoever computes never waits for it."""

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvrelay.kv.tiers.tier import PageKeys, Tier

log = logging.getLogger(__name__)

TASKS_MAX: Final = 1024
"""Tasks on their way; past it new ones are refused. A write is one page, a load one prompt's."""

IDLE_WAKE_S: Final = 1.0
"""How often the idle thread looks whether it should end; a task wakes it at once."""

LOADS_FIRST: Final = 0
WRITES_LATER: Final = 1
"""Somebody waits for a load; nobody waits for a write."""


@dataclass(frozen=True, slots=True)
class Written:
    """A page was written, or not; `gone` pages had to go for it."""

    page: PageKeys
    done: bool
    gone: tuple[PageKeys, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first `pages` pages of a load were read and verified."""

    load_id: int
    pages: int
    elapsed_s: float
    gone: tuple[PageKeys, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The tier was emptied."""

    gone: tuple[PageKeys, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """The tier cannot be used any more: tasks end undone from here on, and it may be asked from any thread."""

    reason: str


Result: TypeAlias = Written | Loaded | Cleared | Broken


@dataclass(order=True, slots=True)
class _Task:
    rank: int
    number: int
    run: Callable[[], Result | None] = field(compare=False)
    failed: Result | None = field(compare=False)  # what is told when it cannot be done


class TierWorker:
    """Runs puts and gets of a tier on a thread of its own. Memory given to it must stay in place until its result.

    Args:
        tier: used by this thread alone from now on, but for `contains` and the bytes it uses.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._tasks: queue.PriorityQueue[_Task] = queue.PriorityQueue(maxsize=TASKS_MAX)
        self._results: deque[Result] = deque()  # bounded by the tasks that were taken
        self._numbers = itertools.count()
        self._taken = 0  # counted by the callers' thread
        self._ended = 0  # counted by the tier's own, when the result is there
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tier {tier.name}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True until everything asked for has been done and its results have been taken."""
        return self._ended < self._taken or bool(self._results)

    def put(self, page: PageKeys, data: memoryview) -> bool:
        """Have a page written; False when too much waits already."""
        return self._add(WRITES_LATER, lambda: self._put(page, data), Written(page, done=False, gone=()))

    def get(self, load_id: int, pages: Sequence[tuple[PageKeys, memoryview]]) -> bool:
        """Have pages of one chain read, in order and up to the first that is missing; False as for `put`."""
        asked_at_s = time.monotonic()
        return self._add(LOADS_FIRST, lambda: self._get(load_id, pages, asked_at_s), Loaded(load_id, 0, 0.0, gone=()))

    def touch(self, names: Sequence[bytes]) -> bool:
        """Have uses noted; False as for `put`. There is no result."""
        return self._add(WRITES_LATER, lambda: self.tier.touch(names), None)

    def clear(self) -> bool:
        """Have every page dropped; False as for `put`."""
        return self._add(WRITES_LATER, self._clear, None)

    def results(self) -> list[Result]:
        """Return what was done since the last call, in order."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self, timeout_s: float) -> bool:
        """Finish what runs, leave what waits, close the tier; False when the thread had not ended in time."""
        self._closing.set()
        self._add(LOADS_FIRST, lambda: None, None)  # wakes it
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ any thread

    def _add(self, rank: int, run: Callable[[], Result | None], failed: Result | None) -> bool:
        try:
            self._tasks.put_nowait(_Task(rank, next(self._numbers), run, failed))
        except queue.Full:
            return False
        self._taken += 1
        return True

    # ------------------------------------------------------------ its own thread

    def _work(self) -> None:
        broken = False
        while not self._closing.is_set():
            try:
                task = self._tasks.get(timeout=IDLE_WAKE_S)
            except queue.Empty:
                continue
            result = task.failed
            if not broken:
                try:
                    result = task.run()
                except Exception as error:  # whatever a tier does, its owner's memory is given back
                    broken = True
                    log.exception("tier_broken", extra={"tier": self.tier.name})
                    self._results.append(Broken(str(error)))
            if result is not None:
                self._results.append(result)
            self._ended += 1
        self.tier.close()

    def _put(self, page: PageKeys, data: memoryview) -> Result:
        outcome = self.tier.put(page, data)
        return Written(page, done=outcome.done, gone=outcome.gone)

    def _get(self, load_id: int, pages: Sequence[tuple[PageKeys, memoryview]], asked_at_s: float) -> Result:
        read, gone = 0, tuple[PageKeys, ...]()
        for page, into in pages:
            outcome = self.tier.get(page, into)
            gone += outcome.gone
            if not outcome.done:
                break
            read += 1
        return Loaded(load_id, read, time.monotonic() - asked_at_s, gone)

    def _clear(self) -> Result:
        gone = tuple[PageKeys, ...]()
        for page in self.tier.pages():
            gone += self.tier.remove(page.name)
        return Cleared(gone)
