"""Who owns each page of the KV pool.

A page is in exactly one state, and the states add up to the pool:

    free         nobody's; its bytes mean nothing
    active       in the block table of at least one sequence (it may be leased and keyed besides)
    leased       in no block table, but promised to a puller
    cached       in no block table, under no lease, named by a key: reusable, and given up when room is needed
    quarantined  nobody's, but a READ may still land in it

Nothing writes a page that has more than one reference, a key, or a lease other than its only writer's own.
"""

import array
import enum
from collections import OrderedDict, deque


class PageState(enum.IntEnum):
    """State of a page; see the module."""

    FREE = 0
    ACTIVE = 1
    LEASED = 2
    CACHED = 3
    QUARANTINED = 4


class PagePool:
    """Reference counts, generations and reservations of `total` pages. Every operation on a page is O(1).

    A reservation sets pages aside without naming them: whoever holds one can allocate that many pages later, whatever
    others do in between. `available` is what is left for new reservations, counting cached pages as room.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved = 0
        self._references = array.array("I", bytes(4 * total))
        self._leases = array.array("I", bytes(4 * total))
        self._generations = array.array("Q", bytes(8 * total))
        self._keyed = bytearray(total)
        self._states = bytearray(total)
        self._counts = [total, 0, 0, 0, 0]
        self._free: deque[int] = deque(range(total))
        # Least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    def count(self, state: PageState) -> int:
        """Return how many pages are in a state."""
        return self._counts[state]

    @property
    def available(self) -> int:
        """Pages that a new reservation, or a new pin on cached pages, may take."""
        return self._counts[PageState.FREE] + self._counts[PageState.CACHED] - self.reserved

    def state(self, page: int) -> PageState:
        """Return the state of a page."""
        return PageState(self._states[page])

    def generation(self, page: int) -> int:
        """Return how often the page has been assigned."""
        return self._generations[page]

    def leased(self, page: int) -> bool:
        """Tell whether the page is under at least one lease."""
        return self._leases[page] > 0

    # ------------------------------------------------------------ room

    def reserve(self, pages: int) -> bool:
        """Set pages aside; False, and nothing changed, when there are too few."""
        if pages > self.available:
            return False
        self.reserved += pages
        return True

    def unreserve(self, pages: int) -> None:
        """Give back a part of a reservation that was not used."""
        assert 0 <= pages <= self.reserved
        self.reserved -= pages

    def allocate(self) -> int:
        """Turn one reserved page into an active one with one reference and a new generation; a page must be free."""
        assert self.reserved > 0, "allocation without a reservation"
        self.reserved -= 1
        page = self._free.popleft()
        self._generations[page] += 1
        self._references[page] = 1
        self._settle(page)
        return page

    def oldest_cached(self) -> int | None:
        """Return the least recently used cached page."""
        return next(iter(self._cached), None)

    # ------------------------------------------------------------ references, leases, keys

    def acquire(self, page: int) -> None:
        """Add a reference to a page that is active, leased or cached; a cached one must be `available`."""
        assert self._states[page] not in (PageState.FREE, PageState.QUARANTINED)
        self._references[page] += 1
        self._settle(page)
        assert self.available >= 0, "pinned what others have reserved"

    def release(self, page: int) -> None:
        """Drop a reference. A sequence releases its last page first, so that children are reused before parents."""
        assert self._references[page] > 0
        self._references[page] -= 1
        self._settle(page)

    def add_lease(self, page: int) -> None:
        """Put the page under one more lease; a cached one must be `available`."""
        assert self._states[page] not in (PageState.FREE, PageState.QUARANTINED)
        self._leases[page] += 1
        self._settle(page)
        assert self.available >= 0, "leased what others have reserved"

    def drop_lease(self, page: int) -> None:
        """Take the page from under one lease."""
        assert self._leases[page] > 0
        self._leases[page] -= 1
        self._settle(page)

    def set_key(self, page: int) -> None:
        """Note that a key names the page: its content is final."""
        assert self._references[page] == 1
        assert not self._keyed[page]
        self._keyed[page] = True
        self._settle(page)

    def clear_key(self, page: int) -> None:
        """Note that no key names the page any more."""
        assert self._keyed[page]
        self._keyed[page] = False
        self._settle(page)

    def check_writable(self, page: int, *, own_lease: bool) -> None:
        """Assert that a sequence that is the page's only holder may write it."""
        assert self._references[page] == 1, f"page {page} has {self._references[page]} references"
        assert not self._keyed[page], f"page {page} has a key"
        assert self._leases[page] == own_lease, f"page {page} is leased to others"

    # ------------------------------------------------------------ quarantine

    def quarantine(self, page: int) -> None:
        """Give up a private page into which a READ may still land."""
        self.check_writable(page, own_lease=False)
        self._references[page] = 0
        self._move(page, PageState.QUARANTINED)

    def readmit(self, page: int) -> None:
        """Free a quarantined page: nothing can land in it any more."""
        assert self._states[page] == PageState.QUARANTINED
        self._move(page, PageState.FREE)

    # ------------------------------------------------------------ bookkeeping

    def check_integrity(self) -> None:
        """Prove from the pages themselves that the states add up and that reservations can be honoured."""
        counts = [0] * len(PageState)
        for page in range(self.total):
            state = self._states[page]
            assert state in (self._owed_state(page), PageState.QUARANTINED), f"page {page}"
            counts[state] += 1
        assert counts == self._counts
        assert sum(counts) == self.total
        assert sorted(self._free) == [p for p in range(self.total) if self._states[p] == PageState.FREE]
        assert sorted(self._cached) == [p for p in range(self.total) if self._states[p] == PageState.CACHED]
        assert 0 <= self.reserved <= counts[PageState.FREE] + counts[PageState.CACHED]

    def _owed_state(self, page: int) -> PageState:
        if self._references[page]:
            return PageState.ACTIVE
        if self._leases[page]:
            return PageState.LEASED
        return PageState.CACHED if self._keyed[page] else PageState.FREE

    def _settle(self, page: int) -> None:
        self._move(page, self._owed_state(page))

    def _move(self, page: int, new: PageState) -> None:
        old = self._states[page]
        if old == new:
            return
        if old == PageState.CACHED:
            del self._cached[page]
        if new == PageState.CACHED:
            self._cached[page] = None
        elif new == PageState.FREE:
            self._free.append(page)
        self._states[page] = new
        self._counts[old] -= 1
        self._counts[new] += 1
