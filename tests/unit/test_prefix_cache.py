import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.pool import PagePool, PageState
from kvrelay.engine.prefix_cache import PrefixCache


def key(*path):
    return hashlib.sha256(repr(path).encode()).digest()[:16]


def chain(*path):
    """Keys of all prefixes of a path, as a chain of blocks."""
    return [key(*path[: i + 1]) for i in range(len(path))]


class Store:
    """A cache and what a sequence does with it."""

    def __init__(self, pages=8, blocks_per_page=1):
        self.pool = PagePool(pages)
        self.blocks_per_page = blocks_per_page
        self.cache = PrefixCache(self.pool, blocks_per_page=blocks_per_page)

    def write(self, keys):
        """Allocate a page for each page's keys and name it; returns the block table."""
        step = self.blocks_per_page
        pages = []
        for start in range(0, len(keys), step):
            assert self.pool.reserve(1)
            page = self.cache.allocate()
            parent = keys[start - 1] if start else None
            self.cache.insert(page, tuple(keys[start : start + step]), parent=parent)
            pages.append(page)
        return pages

    def leave(self, pages):
        for page in reversed(pages):
            self.pool.release(page)

    def check(self):
        self.pool.check_integrity()
        self.cache.check_integrity()


def test_the_longest_held_prefix_is_found_up_to_a_bound():
    store = Store()
    pages = store.write(chain(1, 2, 3))
    assert store.cache.match(chain(1, 2, 3, 4), max_pages=9) == pages
    assert store.cache.match(chain(1, 2, 9), max_pages=9) == pages[:2]
    assert store.cache.match(chain(1, 2, 3), max_pages=1) == pages[:1]
    assert store.cache.match(chain(7), max_pages=9) == []


def test_the_oldest_leaf_goes_first_and_parents_after_their_children():
    store = Store(pages=3)
    store.leave(store.write(chain(1, 2)))
    store.leave(store.write(chain(5)))
    store.cache.changes.take()
    gone = []
    for _ in range(3):
        assert store.pool.reserve(1)
        store.cache.allocate()
        gone += store.cache.changes.take()[1]
        store.check()
    assert gone == [key(1, 2), key(1), key(5)]


def test_pages_in_use_or_under_lease_are_not_given_up():
    store = Store(pages=2)
    [active] = store.write(chain(1))
    [leased] = store.write(chain(2))
    store.pool.add_lease(leased)
    store.leave([leased])
    assert store.pool.available == 0
    store.cache.clear()
    assert store.cache.match(chain(1), max_pages=1) == [active]
    assert store.cache.match(chain(2), max_pages=1) == [leased]


def test_a_page_for_blocks_that_are_cached_already_gets_no_name():
    store = Store()
    [first] = store.write(chain(1))
    assert store.pool.reserve(1)
    second = store.cache.allocate()
    assert store.cache.insert(second, (key(1),), parent=None) == first
    store.pool.release(second)
    assert store.pool.state(second) is PageState.FREE


def test_a_child_whose_parent_is_not_cached_gets_no_name():
    store = Store()
    assert store.pool.reserve(1)
    page = store.cache.allocate()
    assert store.cache.insert(page, (key(1, 2),), parent=key(1)) == page
    assert len(store.cache) == 0


def test_a_parent_given_up_under_a_used_child_takes_the_childs_name_along():
    store = Store(pages=2)
    [parent] = store.write(chain(1))
    assert store.pool.reserve(1)
    child = store.cache.allocate()
    store.cache.insert(child, (key(1, 2),), parent=key(1))
    store.leave([parent])  # the child's sequence has a private copy of the parent's blocks
    assert store.pool.reserve(1)
    assert store.cache.allocate() == parent
    assert store.cache.changes.take() == ((), ())
    assert store.pool.state(child) is PageState.ACTIVE
    store.check()


def test_all_blocks_of_a_page_are_told_and_shared_blocks_only_once():
    store = Store(blocks_per_page=2)
    left, right = chain(1, 2), [key(1), key(1, 3)]
    store.leave(store.write(left))
    store.leave(store.write(right))
    assert store.cache.changes.take() == ((key(1), key(1, 2), key(1, 3)), ())
    store.cache.clear()
    added, removed = store.cache.changes.take()
    assert added == ()
    assert removed == (key(1, 2), key(1, 3), key(1))


def test_what_came_and_went_between_two_looks_is_not_told():
    store = Store()
    store.leave(store.write(chain(1, 2)))
    store.cache.clear()
    assert store.cache.changes.take() == ((), ())
    store.leave(store.write(chain(1)))
    store.cache.changes.take()
    store.cache.clear()
    store.leave(store.write(chain(1)))
    assert store.cache.changes.take() == ((), ())


paths = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(paths, st.booleans()), max_size=30))
def test_random_histories_keep_parents_with_children_and_tell_the_truth(history):
    """Sequences of shared prefixes come, read what is cached, write the rest and leave, at once or later."""
    store = Store(pages=7)
    told = set()
    staying = []
    for path, stays in history:
        keys = chain(*path)
        hits = store.cache.match(keys, max_pages=len(keys))
        idle = sum(store.pool.state(page) is PageState.CACHED for page in hits)
        if idle + len(keys) - len(hits) > store.pool.available:
            if staying:
                store.leave(staying.pop(0))
            continue
        for page in hits:
            store.pool.acquire(page)
        assert store.pool.reserve(len(keys) - len(hits))
        table = list(hits)
        for i in range(len(hits), len(keys)):
            page = store.cache.allocate()
            store.cache.insert(page, (keys[i],), parent=keys[i - 1] if i else None)
            table.append(page)
        if stays:
            staying.append(table)
        else:
            store.leave(table)
        added, removed = store.cache.changes.take()
        assert not told & set(added)
        assert told >= set(removed)
        told = (told | set(added)) - set(removed)
        for name in told:
            assert store.cache.page_of(name) is not None
        assert len(told) == len(store.cache)
        store.check()
