"""What a lower tier is: a store of whole, final pages under the names of their blocks.

A tier holds a page only while it holds the page before it, so that the longest held prefix of a chain can be found by
walking it, and so that a replica never publishes a block whose parent it lacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PageKeys:
    """The names in a page.

    Attributes:
        keys: keys of its blocks; the last one names the page.
        parent: name of the page before it in the chain; None at the front.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None

    @property
    def name(self) -> bytes:
        """Key of the page's last block."""
        return self.keys[-1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a put or a get.

    Attributes:
        done: the page came into the tier (put), or its bytes were read and verified (get).
        gone: pages that the tier dropped on the way, children before their parents.
    """

    done: bool
    gone: tuple[PageKeys, ...] = ()


class Tier(Protocol):
    """A store of pages. `contains` and `bytes_used` may be asked from any thread, the rest belongs to one.

    Memory is given as writable bytes in place: a page's own bytes in the pool, or an address mapped by a device.
    """

    name: str
    bytes_max: int

    @property
    def bytes_used(self) -> int:
        """Bytes that the pages take, headers included."""
        ...

    def contains(self, name: bytes) -> bool:
        """Tell whether the page is held; its bytes are verified only by `get`."""
        ...

    def pages(self) -> list[PageKeys]:
        """Return every page held, parents before their children."""
        ...

    def put(self, page: PageKeys, data: memoryview) -> Outcome:
        """Store a page, dropping the least recently used ones for it.

        Refused when it is held already, when the page before it is not, and when there is no room.

        Raises:
            TierError: the tier cannot be written any more.
        """
        ...

    def get(self, page: PageKeys, into: memoryview) -> Outcome:
        """Read a page and verify it. What is not whole and right is a miss, and is dropped with all that follows it."""
        ...

    def touch(self, names: Sequence[bytes]) -> None:
        """Note that pages were used; unknown ones are ignored."""
        ...

    def remove(self, name: bytes) -> tuple[PageKeys, ...]:
        """Drop a page and all that follows it; return them, children before their parents."""
        ...

    def close(self) -> None:
        """Let go of the store; the pages stay."""
        ...


class TierError(Exception):
    """A tier cannot be used: the message says why."""
