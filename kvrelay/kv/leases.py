"""Leases: an owner's promise to keep listed pages in place until they are pulled or a deadline passes.

    GRANTED ──reading()──> READING
       │                      │
       ├──────────────────────┼── confirm(), release() ──> RELEASED
       ├──────────────────────┼── expire() ──────────────> EXPIRED
       └── revoke()           │                            REVOKED (from GRANTED only)

A pure state machine on the owner's clock. It owns no page: the pool does, and tells the generation of each. A method
that ends a lease returns the `Ended` of it, whose pages the caller unpins, once a lease.

Whether a pull was good has nothing to do with the lease's state: it was if every page still has the generation it had
at grant. So a lease that has ended is remembered for a while, with what it granted and the verdict that was given.
"""

import collections
import enum
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvrelay.config import VERDICT_KEPT_S
from kvrelay.engine.protocol import LeasedPage, LeaseGrant
from kvrelay.errors import InvalidArgument, ResourceExhausted

ACTIVE_MAX: Final = 4096
"""Leases at once. Many times the jobs an engine queues; leases over shared pages are not bounded by the pool."""

ENDED_KEPT_MAX: Final = 16384
"""Ended leases remembered at once: 30 s at 500 a second. A forgotten one is unknown, and a pull of it invalid."""


class LeaseState(enum.StrEnum):
    """Where a lease stands; the last three are final."""

    GRANTED = "granted"
    READING = "reading"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that has just ended; `pages` are to be unpinned, once."""

    lease_id: str
    state: LeaseState
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Verdict on a pull.

    Attributes:
        valid: the bytes read are those granted.
        reason: "generation" or "unknown_lease" when not valid.
        ended: the lease, when this call ended it.
    """

    valid: bool
    reason: str = ""
    ended: Ended | None = None


@dataclass(slots=True)
class _Lease:
    lease_id: str
    pages: tuple[LeasedPage, ...]
    deadline_s: float
    priority: int
    state: LeaseState = LeaseState.GRANTED
    forget_at_s: float = math.inf
    confirmed: frozenset[LeasedPage] | None = None
    verdict: Confirmation | None = None
    granted: frozenset[LeasedPage] = field(init=False)

    def __post_init__(self) -> None:
        self.granted = frozenset(self.pages)


class LeaseTable:
    """All leases of one owner, active and lately ended. Used from the engine thread.

    Args:
        generation: the present generation of a page.
        clock: monotonic seconds.
        name: what lease ids begin with; give each incarnation its own.
        verdict_kept_s: how long an ended lease and its verdict are remembered.
        active_max: bound on active leases.
        ended_kept_max: bound on ended ones that are remembered.
    """

    def __init__(
        self,
        *,
        generation: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
        name: str = "lease",
        verdict_kept_s: float = VERDICT_KEPT_S,
        active_max: int = ACTIVE_MAX,
        ended_kept_max: int = ENDED_KEPT_MAX,
    ) -> None:
        self._generation = generation
        self._clock = clock
        self._name = name
        self._verdict_kept_s = verdict_kept_s
        self._active_max = active_max
        self._ended_kept_max = ended_kept_max
        self._numbers = itertools.count(1)
        self._active: dict[str, _Lease] = {}
        # In the order in which they are forgotten: all are kept for the same time.
        self._ended: collections.OrderedDict[str, _Lease] = collections.OrderedDict()
        self._page_leases: collections.Counter[int] = collections.Counter()
        self._earliest_s = math.inf  # no active lease has a deadline before this

    def __len__(self) -> int:
        """Count the active leases."""
        return len(self._active)

    @property
    def leased_pages(self) -> int:
        """Pages under at least one active lease, for the stock bound."""
        return len(self._page_leases)

    def state(self, lease_id: str) -> LeaseState | None:
        """Return where a lease stands; None when it is unknown."""
        lease = self._active.get(lease_id) or self._ended.get(lease_id)
        return None if lease is None else lease.state

    def pages(self, lease_id: str) -> tuple[LeasedPage, ...]:
        """Return what an active lease granted, in order; empty when it is not active."""
        lease = self._active.get(lease_id)
        return () if lease is None else lease.pages

    def grant(
        self, pages: Iterable[tuple[int, int]], *, first_position: int, ttl_s: float, priority: int = 0
    ) -> LeaseGrant:
        """Grant a lease over (page, valid tokens) pairs, in sequence order; the caller pins the pages.

        Raises:
            InvalidArgument: `ttl_s` is not a positive, finite time.
            ResourceExhausted: there are too many active leases.
        """
        _check_ttl(ttl_s)
        if len(self._active) >= self._active_max:
            raise ResourceExhausted(f"{self._active_max} leases are active; try again when some have ended")
        leased = tuple(LeasedPage(page, self._generation(page), valid) for page, valid in pages)
        lease = _Lease(f"{self._name}-{next(self._numbers)}", leased, self._clock() + ttl_s, priority)
        self._active[lease.lease_id] = lease
        self._page_leases.update(page.page for page in leased)
        self._earliest_s = min(self._earliest_s, lease.deadline_s)
        return LeaseGrant(lease_id=lease.lease_id, pages=leased, first_position=first_position, ttl_s=ttl_s)

    def reading(self, lease_id: str) -> None:
        """Note that the puller may read from now on, which protects the lease from revocation."""
        if lease := self._active.get(lease_id):
            lease.state = LeaseState.READING

    def extend(self, lease_id: str, ttl_s: float) -> bool:
        """Move a lease's deadline to `ttl_s` from now, never to an earlier time.

        Returns False when the lease has ended, is unknown, or is past its deadline.

        Raises:
            InvalidArgument: `ttl_s` is not a positive, finite time.
        """
        _check_ttl(ttl_s)
        lease = self._active.get(lease_id)
        now_s = self._clock()
        if lease is None or lease.deadline_s <= now_s:
            return False
        lease.deadline_s = max(lease.deadline_s, now_s + ttl_s)
        return True

    def confirm(self, lease_id: str, pages: Sequence[LeasedPage]) -> Confirmation:
        """Judge a pull that has ended, and end the lease.

        Valid if and only if each of `pages` was granted by this lease and still has its generation, whatever the state
        of the lease. The same question asked again gets the same answer while the lease is remembered: the bytes were
        read before the first one.
        """
        self._forget_old()
        lease = self._active.get(lease_id) or self._ended.get(lease_id)
        if lease is None:
            return Confirmation(valid=False, reason="unknown_lease")
        asked = frozenset(pages)
        if lease.verdict is not None and lease.confirmed == asked:
            return lease.verdict
        valid = asked <= lease.granted and all(self._generation(page.page) == page.generation for page in asked)
        verdict = Confirmation(valid=valid, reason="" if valid else "generation")
        ended = self._end(lease, LeaseState.RELEASED) if lease_id in self._active else None
        if lease.verdict is None:
            lease.confirmed, lease.verdict = asked, verdict
            self._remember(lease)
        return Confirmation(valid=verdict.valid, reason=verdict.reason, ended=ended)

    def release(self, lease_id: str) -> Ended | None:
        """End a lease that will not be pulled; None when it has ended already or is unknown."""
        lease = self._active.get(lease_id)
        return None if lease is None else self._end(lease, LeaseState.RELEASED)

    def expire(self) -> list[Ended]:
        """End the leases whose deadline has passed, and forget what is kept no longer. Cheap when nothing is due."""
        self._forget_old()
        now_s = self._clock()
        if now_s < self._earliest_s:
            return []
        due = [lease for lease in self._active.values() if lease.deadline_s <= now_s]
        ended = [self._end(lease, LeaseState.EXPIRED) for lease in due]
        self._earliest_s = min((lease.deadline_s for lease in self._active.values()), default=math.inf)
        return ended

    def revocable(self) -> list[str]:
        """Return the leases that may be revoked (GRANTED only): lowest priority first, then latest deadline."""
        granted = [lease for lease in self._active.values() if lease.state is LeaseState.GRANTED]
        granted.sort(key=lambda lease: (lease.priority, -lease.deadline_s))
        return [lease.lease_id for lease in granted]

    def revoke(self, lease_id: str) -> Ended | None:
        """End a GRANTED lease to win its pages back; None, and nothing happens, in any other state."""
        lease = self._active.get(lease_id)
        if lease is None or lease.state is not LeaseState.GRANTED:
            return None
        return self._end(lease, LeaseState.REVOKED)

    def _end(self, lease: _Lease, state: LeaseState) -> Ended:
        del self._active[lease.lease_id]
        lease.state = state
        for page in lease.pages:
            self._unlease(page.page)
        self._remember(lease)
        return Ended(lease.lease_id, state, tuple(page.page for page in lease.pages))

    def _unlease(self, page: int) -> None:
        self._page_leases[page] -= 1
        assert self._page_leases[page] >= 0
        if not self._page_leases[page]:
            del self._page_leases[page]

    def _remember(self, lease: _Lease) -> None:
        lease.forget_at_s = self._clock() + self._verdict_kept_s
        self._ended[lease.lease_id] = lease
        self._ended.move_to_end(lease.lease_id)
        if len(self._ended) > self._ended_kept_max:
            self._ended.popitem(last=False)

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._ended and next(iter(self._ended.values())).forget_at_s <= now_s:
            self._ended.popitem(last=False)


def _check_ttl(ttl_s: float) -> None:
    if not (math.isfinite(ttl_s) and ttl_s > 0):
        raise InvalidArgument("ttl_s", f"{ttl_s} is not a positive time in seconds")
