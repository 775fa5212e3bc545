"""Block tables: how sequences get, fill, share and give back pages."""

from collections.abc import Iterator

from kvrelay.engine.pool import PagePool, PageState
from kvrelay.engine.prefix_cache import PrefixCache
from kvrelay.engine.sequence import Sequence
from kvrelay.kv.keys import block_keys
from kvrelay.kv.tiers.tier import PageKeys
from kvrelay.types import pack_ids, split_keys


class BlockTables:
    """Fills the block tables of sequences from a pool and its prefix cache."""

    def __init__(self, pool: PagePool, cache: PrefixCache, *, page_tokens: int, block_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._blocks_per_page = page_tokens // block_tokens
        self._pool = pool
        self._cache = cache

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold that many tokens."""
        return -(-tokens // self.page_tokens)

    def match(self, sequence: Sequence) -> list[int]:
        """Return the cached pages that the sequence can use, from its front, without taking them."""
        return self._cache.match(sequence.keys, max_pages=self._usable_pages(sequence))

    def page_keys(self, sequence: Sequence, first: int) -> Iterator[PageKeys]:
        """Yield the names of the pages, from the `first` on, that the sequence could use if they were cached."""
        step = self._blocks_per_page
        for index in range(first, self._usable_pages(sequence)):
            parent = sequence.keys[index * step - 1] if index else None
            yield PageKeys(tuple(sequence.keys[index * step : (index + 1) * step]), parent)

    def held_tokens(self, sequence: Sequence) -> int:
        """Return how much of the sequence the cache holds, without taking it."""
        return len(self.match(sequence)) * self.page_tokens

    def pin(self, sequence: Sequence) -> None:
        """Put the cached prefix into an empty block table, as far as no reservation needs the pages."""
        assert not sequence.pages
        pages = self.match(sequence)
        room = self._pool.available
        for count, page in enumerate(pages):
            room -= self._pool.state(page) == PageState.CACHED
            if room < 0:
                del pages[count:]
                break
        self._take(sequence, pages)

    def admit(self, sequence: Sequence, tokens: int) -> bool:
        """Set room aside for the first `tokens` tokens, after taking what is cached beyond the block table.

        Returns False, and changes nothing, when there is no room.
        """
        hits = self._match_beyond(sequence)
        idle = sum(self._pool.state(page) == PageState.CACHED for page in hits)
        wanted = self.pages_for(tokens) - len(hits) - len(sequence.pages)
        if wanted + idle > self._pool.available:
            return False
        self._take(sequence, hits)
        self._reserve(sequence, max(wanted, 0))
        return True

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Allocate pages out of the sequence's reservation until they hold `tokens` tokens."""
        for _ in range(self.pages_for(tokens) - len(sequence.pages)):
            assert sequence.reserved > 0
            sequence.reserved -= 1
            sequence.pages.append(self._cache.allocate())

    def check_writable(self, sequence: Sequence, tokens: int) -> None:
        """Assert that the next `tokens` tokens may be written."""
        first, end = sequence.computed // self.page_tokens, self.pages_for(sequence.computed + tokens)
        for index in range(first, end):
            own_lease = sequence.leased_from is not None and index >= sequence.leased_from
            self._pool.check_writable(sequence.pages[index], own_lease=own_lease)

    def publish(self, sequence: Sequence) -> None:
        """Offer the pages that became full and final to the cache."""
        full = sequence.computed // self.page_tokens
        if full == sequence.named:
            return
        self._extend_keys(sequence, full * self._blocks_per_page)
        for index in range(sequence.named, full):
            self._name(sequence, index)
        sequence.named = full

    def cut(self, sequence: Sequence, pages: int, *, quarantined: frozenset[int] = frozenset()) -> None:
        """Give back all pages but the first `pages`, and the reservation; `quarantined` ones may still be written."""
        self._pool.unreserve(sequence.reserved)
        sequence.reserved = 0
        given_back, sequence.pages = sequence.pages[pages:], sequence.pages[:pages]
        for page in reversed(given_back):
            if page in quarantined:
                self._pool.quarantine(page)
            else:
                self._pool.release(page)
        sequence.named = min(sequence.named, pages)
        sequence.computed = min(sequence.computed, pages * self.page_tokens)

    # ------------------------------------------------------------ inside

    def _usable_pages(self, sequence: Sequence) -> int:
        # The last token is always computed: its logits are needed.
        return (len(sequence.ids) - 1) // self.page_tokens

    def _match_beyond(self, sequence: Sequence) -> list[int]:
        pages, pinned = self.match(sequence), list(sequence.pages)
        return pages[len(pinned) :] if pages[: len(pinned)] == pinned else []

    def _take(self, sequence: Sequence, pages: list[int]) -> None:
        for page in pages:
            self._pool.acquire(page)
        self._cache.hit(pages)
        sequence.pages.extend(pages)
        sequence.named = len(sequence.pages)
        sequence.computed = max(sequence.computed, len(sequence.pages) * self.page_tokens)

    def _reserve(self, sequence: Sequence, pages: int) -> None:
        reserved = self._pool.reserve(pages)
        assert reserved
        sequence.reserved += pages

    def _extend_keys(self, sequence: Sequence, blocks: int) -> None:
        known = len(sequence.keys)
        if blocks <= known:
            return
        ids = sequence.ids[known * self._block_tokens : blocks * self._block_tokens]
        parent = sequence.keys[-1] if known else None
        sequence.keys += split_keys(block_keys(sequence.root_key, pack_ids(ids), self._block_tokens, parent=parent))

    def _name(self, sequence: Sequence, index: int) -> None:
        """Offer one page; when the cache has these blocks already, share its page and give the private copy back."""
        step = self._blocks_per_page
        own = sequence.pages[index]
        parent = sequence.keys[index * step - 1] if index else None
        kept = self._cache.insert(own, tuple(sequence.keys[index * step : (index + 1) * step]), parent=parent)
        if kept == own or self._pool.leased(own):
            return
        self._pool.release(own)
        self._pool.acquire(kept)
        sequence.pages[index] = kept
