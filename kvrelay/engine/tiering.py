"""The engine's end of a lower tier: pages go down when they are final, and come back when a prompt needs them.

Everything here runs on the engine thread; reading and writing happen on the tier's. Block keys that the tier holds
count as held by the replica, whether or not the pool holds them too.
"""

import ctypes
import logging
from collections.abc import Callable
from typing import Final

from kvrelay.engine.jobs import Job
from kvrelay.engine.parts import Parts
from kvrelay.engine.protocol import TierWrote
from kvrelay.engine.runner import KvMemory
from kvrelay.engine.tier_loads import TierLoads
from kvrelay.engine.tier_writes import TierWrites
from kvrelay.kv.tiers.tier import PageKeys
from kvrelay.kv.tiers.worker import Broken, Cleared, Loaded, TierWorker, Written

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 5.0
"""Longest wait for the read or write that runs: a hundred times what a page takes, and most of a load."""


class Tiering:
    """Writes a pool's pages through to a tier, and loads them again.

    Args:
        worker: the tier's thread.
        parts: of the engine whose pages they are.
        memory: where these lie.
        file_bytes: what a page takes in the tier.
    """

    def __init__(self, worker: TierWorker, parts: Parts, memory: KvMemory, *, file_bytes: int) -> None:
        self._worker = worker
        self._cache = parts.cache
        self._emit = parts.emit
        self._memory = memory
        self._off = False
        self._written_pages = 0
        self._writes = TierWrites(worker, parts, page_at=self._page_at, file_bytes=file_bytes)
        self._loads = TierLoads(worker, parts, page_at=self._page_at, page_bytes=memory.page_bytes)
        self._cache.used = []
        for page in worker.tier.pages():  # what an earlier start of this replica left
            self._cache.changes.add(page.keys)

    @property
    def busy(self) -> bool:
        """True while pages are on their way, or about to be, or a result waits to be noted."""
        return bool(self._cache.used) or self._worker.busy or self._writes.busy or self._loads.busy

    @property
    def pinned(self) -> set[int]:
        """Pages that reads and writes hold."""
        return {*self._writes.pinned, *self._loads.pinned}

    def load(self, job: Job, then: Callable[[], None]) -> bool:
        """Have what the tier holds of a job's prefix loaded if it pays; see `TierLoads.begin`."""
        return not self._off and self._loads.begin(job, then)

    def poll(self) -> None:
        """Take note of what was read and written, and offer the tier what was cached or used since."""
        self._offer()
        for result in self._worker.results():
            match result:
                case Written():
                    self._written(result)
                case Loaded():
                    self._loaded(result)
                case Cleared():
                    self._drop(result.gone)
                case Broken():
                    self._turn_off(result)
        self._loads.give_up()
        self._tell()

    def clear(self) -> None:
        """Empty the tier, behind what was asked of it before."""
        if not self._worker.clear():
            log.warning("tier_not_cleared", extra={"tier": self._worker.tier.name})

    def close(self) -> bool:
        """End the tier's thread; False when it still uses the pool's memory."""
        return self._worker.close(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ inside

    def _page_at(self, page: int) -> memoryview:
        size = self._memory.page_bytes
        data = (ctypes.c_ubyte * size).from_address(self._memory.base_address + page * size)
        return memoryview(data).cast("B")

    def _offer(self) -> None:
        used = self._cache.used
        if not used:
            return
        self._cache.used = []
        if not self._off:
            self._writes.offer(used)

    def _written(self, result: Written) -> None:
        self._drop(result.gone)
        self._writes.written(result)
        if result.done:
            self._cache.changes.add(result.page.keys)
            self._written_pages += 1

    def _loaded(self, result: Loaded) -> None:
        self._drop(result.gone)
        self._loads.end(result)

    def _drop(self, gone: tuple[PageKeys, ...]) -> None:
        for page in gone:
            self._cache.changes.remove(page.keys)

    def _turn_off(self, result: Broken) -> None:
        """Go on without the tier: what it holds is no longer held by this replica."""
        self._off = True
        self._writes.stop()
        log.error("tier_off", extra={"tier": self._worker.tier.name, "reason": result.reason})
        self._cache.used = None
        self._drop(tuple(reversed(self._worker.tier.pages())))

    def _tell(self) -> None:
        writes = self._writes
        if writes.busy or not (self._written_pages or writes.left_out):
            return
        written_bytes = self._written_pages * self._memory.page_bytes
        self._emit(TierWrote(tier=self._worker.tier.name, bytes=written_bytes, unwritten_pages=writes.left_out))
        self._written_pages = writes.left_out = 0
