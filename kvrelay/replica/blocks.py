"""What the engine caches, and what the registry has been told of it. Pure, and safe to use from two threads."""

import threading
from collections.abc import Iterable

from kvrelay.directory import BlockBatch
from kvrelay.types import KEY_BYTES

BATCH_KEYS_MAX = 4096
"""Keys in one batch: 64 KiB on the wire, about a millisecond of the registry's script."""


class BlockLedger:
    """Turns the engine's changes into numbered batches for the registry.

    Changes are kept as the set of keys whose membership differs or may differ from what was told: a key that comes
    and goes between two batches costs nothing, and the backlog is bounded by the blocks of the pool, however long the
    registry stays away. A batch stays in flight until it is acknowledged; a batch whose fate is unknown is sent again
    under its number, and the registry asks for a snapshot if it had taken it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[bytes] = set()
        self._told: set[bytes] = set()
        self._changed: dict[bytes, None] = {}  # in order of change: a parent before its child
        self._flying: BlockBatch | None = None
        self._seq = 0
        self._xor = 0

    def change(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Take in a change of the engine's cache."""
        with self._lock:
            for key in removed:
                self._held.discard(key)
                self._changed[key] = None
            for key in added:
                self._held.add(key)
                self._changed[key] = None

    def restart(self) -> None:
        """Begin a new epoch: the registry's set is empty at seq 0, everything held is to be told."""
        with self._lock:
            self._told = set()
            self._flying = None
            self._seq = 0
            self._xor = 0
            self._changed = dict.fromkeys(self._held)

    def batch(self) -> BlockBatch | None:
        """Return the batch in flight or a new one; None when the registry knows everything."""
        with self._lock:
            if self._flying is None:
                self._flying = self._next_batch()
            return self._flying

    def acknowledge(self) -> None:
        """The registry has taken the batch in flight."""
        with self._lock:
            self._flying = None

    def snapshot(self) -> tuple[int, list[bytes]]:
        """Return (seq, keys) of the whole set; batches continue after it."""
        with self._lock:
            self._flying = None
            self._changed = {}
            self._told = set(self._held)
            self._xor = 0
            for key in self._told:
                self._xor ^= int.from_bytes(key)
            self._seq += 1
            return self._seq, list(self._told)

    @property
    def held(self) -> int:
        """Blocks in the engine's cache."""
        return len(self._held)

    def _next_batch(self) -> BlockBatch | None:
        added: list[bytes] = []
        removed: list[bytes] = []
        while self._changed and len(added) + len(removed) < BATCH_KEYS_MAX:
            key = next(iter(self._changed))
            del self._changed[key]
            if (key in self._held) != (key in self._told):
                (added if key in self._held else removed).append(key)
        if not added and not removed:
            return None
        self._told.difference_update(removed)
        self._told.update(added)
        for key in (*added, *removed):
            self._xor ^= int.from_bytes(key)
        self._seq += 1
        return BlockBatch(
            seq=self._seq,
            added=tuple(added),
            removed=tuple(removed),
            count=len(self._told),
            xor=self._xor.to_bytes(KEY_BYTES),
        )
