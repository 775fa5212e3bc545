"""Write-through: final pages of the pool on their way to a lower tier.

A page is pinned while it is written, so that computing never waits for a write and no page is reused under one. Pins
are given back in one go when nothing is being written, last page first: in the order in which sequences give theirs
back, which has children reused before their parents.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from kvrelay.engine.parts import Parts
from kvrelay.engine.pool import PageState
from kvrelay.engine.prefix_cache import Entry
from kvrelay.kv.tiers.policy import worth_writing
from kvrelay.kv.tiers.tier import PageKeys
from kvrelay.kv.tiers.worker import TierWorker, Written

PINNED_SHARE_MAX: Final = 0.25
"""Share of the pool that writes may pin; others wait unpinned, and are not written if they go before their turn."""
BACKLOG_MAX: Final = 4096
"""Pages that wait to be written: past it pages are left out, and get another chance when they are hit."""


class TierWrites:
    """Offers pages to a tier.

    Args:
        worker: writes them.
        parts: of the engine whose pages they are.
        page_at: maps a page to its bytes.
        file_bytes: what a page takes in the tier.

    Attributes:
        left_out: pages that were worth writing and found no place on the way.
    """

    def __init__(
        self, worker: TierWorker, parts: Parts, *, page_at: Callable[[int], memoryview], file_bytes: int
    ) -> None:
        self.left_out = 0
        self._worker = worker
        self._pool = parts.pool
        self._cache = parts.cache
        self._page_at = page_at
        self._file_bytes = file_bytes
        self._pinned_max = max(int(parts.pool.total * PINNED_SHARE_MAX), 1)
        self._backlog: deque[Entry] = deque()
        self._pinned: list[int] = []
        self._writing: set[bytes] = set()

    @property
    def busy(self) -> bool:
        """True while pages are being written."""
        return bool(self._writing)

    @property
    def pinned(self) -> list[int]:
        """Pages that have a reference of ours."""
        return self._pinned

    def offer(self, used: Iterable[Entry]) -> None:
        """Have pages that were cached or hit written, if that is worth it when their turn comes."""
        touched = []
        for entry in used:
            if self._worker.tier.contains(entry.name):
                touched.append(entry.name)
            elif len(self._backlog) < BACKLOG_MAX:
                self._backlog.append(entry)
            else:
                self.left_out += 1
        if touched:
            self._worker.touch(touched)
        self._go_on()

    def written(self, result: Written) -> None:
        """Take note that a write is over; give the pins back when it was the last."""
        self._writing.discard(result.page.name)
        if not self._writing:
            for page in reversed(self._pinned):
                self._pool.release(page)
            self._pinned.clear()
            self._go_on()

    def stop(self) -> None:
        """Write nothing more."""
        self._backlog.clear()

    def _go_on(self) -> None:
        while self._backlog and len(self._pinned) < self._pinned_max:
            entry = self._backlog.popleft()
            if self._wanted(entry) and not self._write(entry):
                self.left_out += 1

    def _wanted(self, entry: Entry) -> bool:
        tier = self._worker.tier
        if entry.name in self._writing or self._cache.page_of(entry.name) != entry.page:
            return False
        above = entry.parent
        if above is not None and above.name not in self._writing and not tier.contains(above.name):
            return False
        bytes_free = tier.bytes_max - tier.bytes_used - len(self._writing) * self._file_bytes
        return worth_writing(hits=entry.hits, bytes_free=bytes_free, file_bytes=self._file_bytes)

    def _write(self, entry: Entry) -> bool:
        if self._pool.state(entry.page) == PageState.CACHED and not self._pool.available:
            return False  # a reservation counts on it
        keys = PageKeys(entry.keys, None if entry.parent is None else entry.parent.name)
        if not self._worker.put(keys, self._page_at(entry.page)):
            return False
        self._pool.acquire(entry.page)
        self._pinned.append(entry.page)
        self._writing.add(entry.name)
        return True
