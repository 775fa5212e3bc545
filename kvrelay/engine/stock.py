"""The stock: pages that lie here under lease until others have pulled them, and the bound on how many may."""

import math
from collections.abc import Callable, Iterable

from kvrelay.engine.pool import PagePool, PageState
from kvrelay.engine.prefix_cache import PrefixCache
from kvrelay.engine.protocol import ConfirmLease, ExtendLeases, LeaseGrant, LeasePrefix, LeaseReply
from kvrelay.kv.leases import Ended, LeaseTable
from kvrelay.types import KvLayout, split_keys

NOT_HELD = "not_held"
STOCK_BOUND = "stock_bound"


class Stock:
    """Grants and ends leases, and pins the pages meanwhile.

    Args:
        pool: whose pages are leased.
        cache: finds prefixes for other replicas.
        layout: shape of the pool.
        share: share of the pool that may lie under lease.
        incarnation: what lease ids begin with.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        layout: KvLayout,
        *,
        share: float,
        incarnation: str,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._layout = layout
        self._bound = math.floor(pool.total * share)
        self._ended: set[str] = set()
        self._table = LeaseTable(generation=pool.generation, clock=clock, name=incarnation)

    def __len__(self) -> int:
        """Count the active leases."""
        return len(self._table)

    def takes(self, pages: int) -> bool:
        """Tell whether that many more pages may be leased; more than the bound is taken when nothing else lies here."""
        leased = self._table.leased_pages
        return leased + pages <= self._bound or not leased

    def grant(self, pages: Iterable[int], *, first_position: int, tokens: int, ttl_s: float) -> LeaseGrant:
        """Lease `tokens` tokens that lie in `pages`.

        Raises:
            InvalidArgument: `ttl_s` is no time.
            ResourceExhausted: there are too many leases.
        """
        size = self._layout.page_tokens
        valid = [(page, min(size, tokens - index * size)) for index, page in enumerate(pages)]
        lease = self._table.grant(valid, first_position=first_position, ttl_s=ttl_s)
        for page, _ in valid:
            self._pool.add_lease(page)
        return lease

    def lease_prefix(self, command: LeasePrefix) -> LeaseReply:
        """Lease the longest held prefix past what the puller has, or refuse at once.

        Raises:
            InvalidArgument: the keys or the time to live are no such things.
            ResourceExhausted: there are too many leases.
        """
        keys = split_keys(command.block_keys, name="block_keys")
        size, blocks_per_page = self._layout.page_tokens, self._layout.page_tokens // self._layout.block_tokens
        skipped = command.skip_blocks // blocks_per_page
        pages = self._cache.match(keys, max_pages=len(keys) // blocks_per_page)[skipped:]
        if not pages:
            return LeaseReply(call_id=command.call_id, reason=NOT_HELD)
        idle = sum(self._pool.state(page) == PageState.CACHED for page in pages)
        if not self.takes(len(pages)) or idle > self._pool.available:
            return LeaseReply(call_id=command.call_id, reason=STOCK_BOUND)
        lease = self.grant(pages, first_position=skipped * size, tokens=len(pages) * size, ttl_s=command.ttl_s)
        return LeaseReply(call_id=command.call_id, lease=lease)

    def extend(self, command: ExtendLeases) -> LeaseReply:
        """Move deadlines; name the leases that have ended.

        Raises:
            InvalidArgument: the time to live is no such thing.
        """
        ended = tuple(lease for lease in command.lease_ids if not self._table.extend(lease, command.ttl_s))
        return LeaseReply(call_id=command.call_id, ended=ended)

    def confirm(self, command: ConfirmLease) -> LeaseReply:
        """Judge a pull and end its lease."""
        verdict = self._table.confirm(command.lease_id, command.pages)
        self._unpin(verdict.ended)
        return LeaseReply(call_id=command.call_id, valid=verdict.valid, reason=verdict.reason)

    def release(self, lease_id: str) -> None:
        """End a lease that will not be pulled; unknown ones are ignored."""
        self._unpin(self._table.release(lease_id))

    def expire(self) -> None:
        """End the leases whose time is over."""
        for ended in self._table.expire():
            self._unpin(ended)

    def take_ended(self) -> set[str]:
        """Return the leases that ended, for whatever reason, since the last call."""
        ended, self._ended = self._ended, set()
        return ended

    def _unpin(self, ended: Ended | None) -> None:
        if ended is None:
            return
        self._ended.add(ended.lease_id)
        # From the end, so that children are reused before their parents.
        for page in reversed(ended.pages):
            self._pool.drop_lease(page)
