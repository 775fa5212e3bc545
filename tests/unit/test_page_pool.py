import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.engine.pool import PagePool, PageState

PAGES = 6


def active_page(pool):
    assert pool.reserve(1)
    return pool.allocate()


def test_a_generation_rises_when_a_page_is_assigned_and_stays_when_it_is_given_back():
    pool = PagePool(1)
    page = active_page(pool)
    assert pool.generation(page) == 1
    pool.release(page)
    assert pool.generation(page) == 1
    assert active_page(pool) == page
    assert pool.generation(page) == 2


def test_a_reservation_is_kept_from_others():
    pool = PagePool(3)
    assert pool.reserve(2)
    assert not pool.reserve(2)
    assert pool.available == 1
    pool.unreserve(2)
    assert pool.reserve(3)


def test_allocation_without_a_reservation_is_a_bug():
    with pytest.raises(AssertionError):
        PagePool(1).allocate()


def test_a_page_goes_through_active_leased_and_cached_to_its_next_user():
    pool = PagePool(1)
    page = active_page(pool)
    pool.set_key(page)
    pool.add_lease(page)
    assert pool.state(page) is PageState.ACTIVE
    pool.release(page)
    assert pool.state(page) is PageState.LEASED
    pool.drop_lease(page)
    assert pool.state(page) is PageState.CACHED
    assert pool.oldest_cached() == page
    pool.clear_key(page)
    assert pool.state(page) is PageState.FREE


def test_a_quarantined_page_is_nobodys_until_it_is_readmitted():
    pool = PagePool(1)
    page = active_page(pool)
    pool.quarantine(page)
    assert pool.available == 0
    pool.check_integrity()
    pool.readmit(page)
    assert pool.available == 1


@pytest.mark.parametrize("taint", ["reference", "key", "lease"])
def test_a_shared_named_or_leased_page_must_not_be_written(taint):
    pool = PagePool(1)
    page = active_page(pool)
    pool.check_writable(page, own_lease=False)
    {"reference": pool.acquire, "key": pool.set_key, "lease": pool.add_lease}[taint](page)
    with pytest.raises(AssertionError):
        pool.check_writable(page, own_lease=False)


def test_the_writers_own_lease_does_not_stop_it():
    pool = PagePool(1)
    page = active_page(pool)
    pool.add_lease(page)
    pool.check_writable(page, own_lease=True)


class PoolMachine(RuleBasedStateMachine):
    """Random histories against a model of plain counters."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.references = dict.fromkeys(range(PAGES), 0)
        self.leases = dict.fromkeys(range(PAGES), 0)
        self.keyed = set()
        self.quarantined = set()
        self.reserved = 0

    def idle(self, page):
        return not self.references[page] and not self.leases[page]

    def usable(self, page):
        free = self.idle(page) and page not in self.keyed
        pinned_by_this = self.idle(page)
        return not free and page not in self.quarantined and (not pinned_by_this or self.pool.available > 0)

    @rule(count=st.integers(1, PAGES))
    def reserve(self, count):
        if self.pool.reserve(count):
            self.reserved += count

    @precondition(lambda self: self.reserved and self.pool.count(PageState.FREE))
    @rule()
    def allocate(self):
        page = self.pool.allocate()
        assert self.idle(page)
        assert page not in self.keyed | self.quarantined
        self.reserved -= 1
        self.references[page] = 1

    @rule(page=st.integers(0, PAGES - 1))
    def acquire(self, page):
        if self.usable(page):
            self.pool.acquire(page)
            self.references[page] += 1

    @rule(page=st.integers(0, PAGES - 1))
    def release(self, page):
        if self.references[page]:
            self.pool.release(page)
            self.references[page] -= 1

    @rule(page=st.integers(0, PAGES - 1))
    def add_lease(self, page):
        if self.usable(page):
            self.pool.add_lease(page)
            self.leases[page] += 1

    @rule(page=st.integers(0, PAGES - 1))
    def drop_lease(self, page):
        if self.leases[page]:
            self.pool.drop_lease(page)
            self.leases[page] -= 1

    @rule(page=st.integers(0, PAGES - 1))
    def set_key(self, page):
        if self.references[page] == 1 and page not in self.keyed:
            self.pool.set_key(page)
            self.keyed.add(page)

    @rule(page=st.integers(0, PAGES - 1))
    def clear_key(self, page):
        if page in self.keyed:
            self.pool.clear_key(page)
            self.keyed.discard(page)

    @rule(page=st.integers(0, PAGES - 1))
    def quarantine_or_readmit(self, page):
        if page in self.quarantined:
            self.pool.readmit(page)
            self.quarantined.discard(page)
        elif self.references[page] == 1 and not self.leases[page] and page not in self.keyed:
            self.pool.quarantine(page)
            self.references[page] = 0
            self.quarantined.add(page)

    @invariant()
    def states_add_up(self):
        self.pool.check_integrity()
        assert self.pool.reserved == self.reserved
        assert self.pool.count(PageState.ACTIVE) == sum(map(bool, self.references.values()))
        assert self.pool.count(PageState.QUARANTINED) == len(self.quarantined)


TestPoolHistories = PoolMachine.TestCase
TestPoolHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
