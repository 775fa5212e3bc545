"""The prefix cache: which page holds the KV of which blocks.

Entries form a tree that follows the key chains. A page is found by the key of its last block, and stands for all of its
blocks. An entry is there only while its parent is, so the longest held prefix of a chain can be found by walking it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.engine.pool import PagePool, PageState


@dataclass(slots=True, eq=False)
class Entry:
    """A cached page.

    Attributes:
        page: where it lies.
        keys: keys of its blocks; the last one names the page.
        parent: the page before it in the chain; None at the front.
        children: pages that continue it, by name.
        hits: how often a sequence found it here; counted while somebody asks for `PrefixCache.used`.
    """

    page: int
    keys: tuple[bytes, ...]
    parent: "Entry | None"
    children: "dict[bytes, Entry]" = field(default_factory=dict)
    hits: int = 0

    @property
    def name(self) -> bytes:
        """Key of the page's last block."""
        return self.keys[-1]


class Changes:
    """Block keys that came and went since they were last taken, as a net effect."""

    def __init__(self) -> None:
        self._pages_of_key: Counter[bytes] = Counter()
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, keys: Sequence[bytes]) -> None:
        """Note a page with these block keys; blocks of other cached pages are nothing new."""
        for key in keys:
            self._pages_of_key[key] += 1
            if self._pages_of_key[key] > 1:
                continue
            if key in self._removed:
                del self._removed[key]
            else:
                self._added[key] = None

    def remove(self, keys: Sequence[bytes]) -> None:
        """Note the end of a page with these block keys, last block first."""
        for key in reversed(keys):
            self._pages_of_key[key] -= 1
            if self._pages_of_key[key]:
                continue
            del self._pages_of_key[key]
            if key in self._added:
                del self._added[key]
            else:
                self._removed[key] = None

    def take(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return (added, removed) since the last call; parents are added before, and removed after, their children."""
        taken = tuple(self._added), tuple(self._removed)
        self._added.clear()
        self._removed.clear()
        return taken


class PrefixCache:
    """Names pages of a pool by block keys, and hands out pages, giving up the least recently used entries for them.

    Attributes:
        changes: keys that came and went; lower tiers note theirs here too.
        used: entries that were cached or hit, in order, for whoever empties it; None when nobody does.
    """

    def __init__(self, pool: PagePool, *, blocks_per_page: int) -> None:
        self.changes = Changes()
        self.used: list[Entry] | None = None
        self._pool = pool
        self._blocks_per_page = blocks_per_page
        self._entries: dict[bytes, Entry] = {}
        self._by_page: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, block_keys: Sequence[bytes], *, max_pages: int) -> list[int]:
        """Return the pages of the longest held prefix, in order, at most `max_pages`. Takes no references."""
        pages: list[int] = []
        for name in self._names(block_keys, max_pages):
            entry = self._entries.get(name)
            if entry is None:
                break
            pages.append(entry.page)
        return pages

    def hit(self, pages: Sequence[int]) -> None:
        """Note that a sequence uses cached pages."""
        if self.used is None:
            return
        for page in pages:
            entry = self._by_page[page]
            entry.hits += 1
            self.used.append(entry)

    def page_of(self, name: bytes) -> int | None:
        """Return the page whose last block has this key."""
        entry = self._entries.get(name)
        return None if entry is None else entry.page

    def insert(self, page: int, keys: tuple[bytes, ...], *, parent: bytes | None) -> int:
        """Name an active page whose KV is final; return the page that now stands for these blocks.

        When the blocks are cached already, the page they have stays and `page` gets no name. When `parent` (name of the
        page before; None at the front) is not cached, nothing is named: a child without its parent would not be found.
        """
        assert len(keys) == self._blocks_per_page
        kept = self._entries.get(keys[-1])
        if kept is not None:
            return kept.page
        above = None if parent is None else self._entries.get(parent)
        if above is None and parent is not None:
            return page
        entry = Entry(page, keys, above)
        self._entries[entry.name] = self._by_page[page] = entry
        if above is not None:
            above.children[entry.name] = entry
        self._pool.set_key(page)
        self.changes.add(keys)
        if self.used is not None:
            self.used.append(entry)
        return page

    def allocate(self) -> int:
        """Return a reserved page as an active one, giving up cached pages when none is free."""
        if not self._pool.count(PageState.FREE):
            oldest = self._pool.oldest_cached()
            assert oldest is not None, "a reservation was not covered"
            self._forget(self._by_page[oldest])
        return self._pool.allocate()

    def clear(self) -> None:
        """Forget every page that is in no block table and under no lease, and whatever hangs below it."""
        while (page := self._pool.oldest_cached()) is not None:
            self._forget(self._by_page[page])

    def check_integrity(self) -> None:
        """Prove that both indexes and the tree agree, and that every parent is held."""
        assert len(self._entries) == len(self._by_page)
        for name, entry in self._entries.items():
            assert entry.name == name
            assert self._by_page[entry.page] is entry
            if entry.parent is not None:
                assert self._entries[entry.parent.name] is entry.parent
                assert entry.parent.children[name] is entry

    def _names(self, block_keys: Sequence[bytes], max_pages: int) -> Sequence[bytes]:
        step = self._blocks_per_page
        return block_keys[step - 1 : max_pages * step : step]

    def _forget(self, entry: Entry) -> None:
        """Drop an entry and all below it, children first.

        Sequences hold whole prefixes and release them from the end, so that the oldest cached page has children only
        when a sequence with a private copy of it cached them; they lose their names, whatever their state.
        """
        stack = [entry]
        while stack:
            last = stack[-1]
            if last.children:
                stack.extend(last.children.values())
                continue
            self._drop_leaf(stack.pop())

    def _drop_leaf(self, entry: Entry) -> None:
        if entry.parent is not None:
            del entry.parent.children[entry.name]
        del self._entries[entry.name]
        del self._by_page[entry.page]
        self._pool.clear_key(entry.page)
        self.changes.remove(entry.keys)
