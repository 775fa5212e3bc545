"""Leases on a clock of our own: states, verdicts, bounds, and the promise that no page is unpinned twice or never."""

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from kvrelay.config import VERDICT_KEPT_S
from kvrelay.engine.protocol import LeasedPage
from kvrelay.errors import InvalidArgument, ResourceExhausted
from kvrelay.kv.leases import LeaseState, LeaseTable

TTL_S = 30.0


class Owner:
    """A lease table with the clock and the generations it looks at."""

    def __init__(self, **bounds):
        self.now_s = 1000.0
        self.generations = collections.Counter()
        self.table = LeaseTable(generation=self.generations.__getitem__, clock=lambda: self.now_s, **bounds)

    def grant(self, *pages: int, ttl_s: float = TTL_S, priority: int = 0):
        return self.table.grant([(page, 32) for page in pages], first_position=64, ttl_s=ttl_s, priority=priority)

    def reassign(self, page: int) -> None:
        self.generations[page] += 1


@pytest.fixture
def owner():
    return Owner()


# ---------------------------------------------------------------- granting and ending


def test_a_grant_lists_pages_with_their_generations_in_order(owner):
    owner.reassign(5)
    grant = owner.table.grant([(5, 32), (2, 7)], first_position=64, ttl_s=TTL_S)
    assert grant.pages == (LeasedPage(5, 1, 32), LeasedPage(2, 0, 7))
    assert (grant.first_position, grant.ttl_s) == (64, TTL_S)
    assert owner.table.state(grant.lease_id) is LeaseState.GRANTED


def test_lease_ids_differ_and_begin_with_the_tables_name():
    table = LeaseTable(generation=lambda _page: 0, name="inc1")
    first, second = (table.grant([(0, 1)], first_position=0, ttl_s=1.0).lease_id for _ in range(2))
    assert first != second
    assert first.startswith("inc1-")


def test_releasing_unpins_once_and_twice_is_no_error(owner):
    lease_id = owner.grant(3, 4).lease_id
    ended = owner.table.release(lease_id)
    assert (ended.lease_id, ended.state, ended.pages) == (lease_id, LeaseState.RELEASED, (3, 4))
    assert owner.table.release(lease_id) is None
    assert owner.table.release("never granted") is None


def test_a_lease_expires_at_its_deadline_and_not_before(owner):
    grant = owner.grant(3)
    owner.now_s += TTL_S - 0.001
    assert owner.table.expire() == []
    owner.now_s += 0.001
    [ended] = owner.table.expire()
    assert (ended.lease_id, ended.state, ended.pages) == (grant.lease_id, LeaseState.EXPIRED, (3,))
    assert owner.table.expire() == []


def test_an_extended_lease_lives_from_the_extension(owner):
    lease_id = owner.grant(3).lease_id
    owner.now_s += 20
    assert owner.table.extend(lease_id, TTL_S)
    owner.now_s += 20
    assert owner.table.expire() == []
    owner.now_s += 10
    assert len(owner.table.expire()) == 1


def test_an_extension_never_shortens(owner):
    lease_id = owner.grant(3).lease_id
    assert owner.table.extend(lease_id, 1.0)
    owner.now_s += 2
    assert owner.table.expire() == []


def test_a_lease_past_its_deadline_is_not_brought_back(owner):
    lease_id = owner.grant(3).lease_id
    owner.now_s += TTL_S
    assert not owner.table.extend(lease_id, TTL_S)
    assert len(owner.table.expire()) == 1
    assert not owner.table.extend(lease_id, TTL_S)
    assert not owner.table.extend("never granted", TTL_S)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_to_live_that_is_none_is_refused(owner, ttl_s):
    lease_id = owner.grant(3).lease_id
    with pytest.raises(InvalidArgument, match="ttl_s"):
        owner.grant(1, ttl_s=ttl_s)
    with pytest.raises(InvalidArgument, match="ttl_s"):
        owner.table.extend(lease_id, ttl_s)


# ---------------------------------------------------------------- verdicts


def test_a_pull_of_pages_that_kept_their_generation_is_valid_and_ends_the_lease(owner):
    grant = owner.grant(3, 4)
    verdict = owner.table.confirm(grant.lease_id, grant.pages)
    assert (verdict.valid, verdict.reason) == (True, "")
    assert (verdict.ended.state, verdict.ended.pages) == (LeaseState.RELEASED, (3, 4))


def test_a_part_of_the_lease_may_be_confirmed(owner):
    grant = owner.grant(3, 4)
    owner.reassign(4)
    assert owner.table.confirm(grant.lease_id, grant.pages[:1]).valid


def test_a_pull_of_a_reassigned_page_is_invalid(owner):
    grant = owner.grant(3, 4)
    owner.reassign(4)
    verdict = owner.table.confirm(grant.lease_id, grant.pages)
    assert (verdict.valid, verdict.reason) == (False, "generation")
    assert verdict.ended is not None


def test_a_page_that_was_not_granted_is_invalid(owner):
    grant = owner.grant(3)
    assert not owner.table.confirm(grant.lease_id, [LeasedPage(4, 0, 32)]).valid
    grant = owner.grant(3)
    assert not owner.table.confirm(grant.lease_id, [LeasedPage(3, 0, 33)]).valid


@pytest.mark.parametrize("end", ["expire", "release", "revoke"])
def test_a_lease_that_has_ended_is_valid_while_its_pages_are_not_reassigned(owner, end):
    good, bad = owner.grant(3), owner.grant(4)
    if end == "expire":
        owner.now_s += TTL_S
        owner.table.expire()
    else:
        for grant in (good, bad):
            getattr(owner.table, end)(grant.lease_id)
    owner.reassign(4)
    verdict = owner.table.confirm(good.lease_id, good.pages)
    assert verdict.valid
    assert verdict.ended is None, "its pages were unpinned when it ended"
    assert owner.table.confirm(bad.lease_id, bad.pages).reason == "generation"


def test_the_same_question_gets_the_same_answer_whatever_happens_to_the_pages_after(owner):
    grant = owner.grant(3)
    assert owner.table.confirm(grant.lease_id, grant.pages).valid
    owner.reassign(3)
    again = owner.table.confirm(grant.lease_id, grant.pages)
    assert again.valid
    assert again.ended is None


def test_an_invalid_verdict_stays_invalid(owner):
    grant = owner.grant(3)
    owner.reassign(3)
    assert not owner.table.confirm(grant.lease_id, grant.pages).valid
    assert not owner.table.confirm(grant.lease_id, grant.pages).valid


def test_another_question_about_a_confirmed_lease_is_judged_afresh(owner):
    grant = owner.grant(3, 4)
    assert owner.table.confirm(grant.lease_id, grant.pages[:1]).valid
    owner.reassign(4)
    assert not owner.table.confirm(grant.lease_id, grant.pages).valid
    assert owner.table.confirm(grant.lease_id, grant.pages[:1]).valid


def test_verdicts_are_kept_for_their_time_and_then_the_lease_is_unknown(owner):
    grant = owner.grant(3)
    owner.table.confirm(grant.lease_id, grant.pages)
    owner.now_s += VERDICT_KEPT_S - 0.001
    assert owner.table.confirm(grant.lease_id, grant.pages).valid
    owner.now_s += 0.001
    verdict = owner.table.confirm(grant.lease_id, grant.pages)
    assert (verdict.valid, verdict.reason) == (False, "unknown_lease")


def test_a_late_verdict_is_kept_for_its_own_time(owner):
    grant = owner.grant(3)
    owner.now_s += TTL_S
    owner.table.expire()
    owner.now_s += VERDICT_KEPT_S - 1
    assert owner.table.confirm(grant.lease_id, grant.pages).valid
    owner.now_s += VERDICT_KEPT_S - 1
    assert owner.table.confirm(grant.lease_id, grant.pages).valid


def test_an_unknown_lease_is_invalid(owner):
    verdict = owner.table.confirm("never granted", [])
    assert (verdict.valid, verdict.reason, verdict.ended) == (False, "unknown_lease", None)


# ---------------------------------------------------------------- revocation


def test_only_granted_leases_may_be_revoked_lowest_priority_then_latest_deadline_first(owner):
    late = owner.grant(1, ttl_s=50).lease_id
    early = owner.grant(2, ttl_s=10).lease_id
    precious = owner.grant(3, ttl_s=99, priority=1).lease_id
    cheap = owner.grant(4, ttl_s=5, priority=-1).lease_id
    read = owner.grant(5, priority=-9).lease_id
    owner.table.reading(read)
    assert owner.table.revocable() == [cheap, late, early, precious]
    assert owner.table.revoke(read) is None
    assert owner.table.state(read) is LeaseState.READING
    assert owner.table.revoke(cheap).state is LeaseState.REVOKED
    assert owner.table.revoke(cheap) is None
    assert not owner.table.extend(cheap, TTL_S)


# ---------------------------------------------------------------- bounds


def test_pages_under_several_leases_count_once_for_the_stock_bound(owner):
    first, second = owner.grant(1, 2, 3), owner.grant(3, 4)
    assert (owner.table.leased_pages, len(owner.table)) == (4, 2)
    owner.table.release(first.lease_id)
    assert owner.table.leased_pages == 2
    owner.table.release(second.lease_id)
    assert (owner.table.leased_pages, len(owner.table)) == (0, 0)


def test_active_leases_are_bounded():
    owner = Owner(active_max=2)
    first, _ = owner.grant(1), owner.grant(2)
    with pytest.raises(ResourceExhausted):
        owner.grant(3)
    owner.table.release(first.lease_id)
    owner.grant(3)


def test_remembered_leases_are_bounded_and_the_oldest_goes_first():
    owner = Owner(ended_kept_max=2)
    grants = [owner.grant(page) for page in range(3)]
    for grant in grants:
        owner.table.release(grant.lease_id)
    assert [owner.table.confirm(grant.lease_id, grant.pages).valid for grant in grants] == [False, True, True]


# ---------------------------------------------------------------- any order of events


class AnyOrder(RuleBasedStateMachine):
    """Pins are kept here as a pool would keep them, and must match the active leases at every moment."""

    leases = Bundle("leases")
    pages = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)

    @initialize()
    def begin(self):
        self.owner = Owner(ended_kept_max=1000)
        self.pins = collections.Counter()
        self.asked = {}
        self.ended_at_s = {}

    @rule(target=leases, pages=pages, ttl_s=st.floats(0.5, 40))
    def grant(self, pages, ttl_s):
        grant = self.owner.grant(*pages, ttl_s=ttl_s)
        self.pins.update(pages)
        return grant

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds):
        self.owner.now_s += seconds
        for ended in self.owner.table.expire():
            self._unpin(ended)

    @rule(grant=leases, ttl_s=st.floats(0.5, 40))
    def extend(self, grant, ttl_s):
        assert self.owner.table.extend(grant.lease_id, ttl_s) == (grant.lease_id not in self.ended_at_s)

    @rule(grant=leases)
    def reading(self, grant):
        before = self.owner.table.state(grant.lease_id)
        self.owner.table.reading(grant.lease_id)
        after = self.owner.table.state(grant.lease_id)
        assert after is (LeaseState.READING if before is LeaseState.GRANTED else before)

    @rule(grant=leases)
    def release(self, grant):
        self._unpin(self.owner.table.release(grant.lease_id))

    @rule(grant=leases)
    def revoke(self, grant):
        allowed = grant.lease_id in self.owner.table.revocable()
        ended = self.owner.table.revoke(grant.lease_id)
        assert (ended is not None) == allowed
        self._unpin(ended)

    @rule(page=st.integers(0, 7))
    def reassign(self, page):
        if not self.pins[page]:
            self.owner.reassign(page)

    @rule(grant=leases, count=st.integers(0, 4))
    def confirm(self, grant, count):
        pages = grant.pages[:count]
        question = grant.lease_id, pages
        fresh = all(self.owner.generations[page.page] == page.generation for page in pages)
        verdict = self.owner.table.confirm(*question)
        self._unpin(verdict.ended)
        if verdict.reason == "unknown_lease":
            assert self.owner.now_s - self.ended_at_s[grant.lease_id] >= VERDICT_KEPT_S
            return
        assert grant.lease_id in self.ended_at_s, "confirming ends the lease"
        first, answer = self.asked.setdefault(grant.lease_id, (pages, fresh))
        assert verdict.valid == (answer if frozenset(first) == frozenset(pages) else fresh)
        assert verdict.reason == ("" if verdict.valid else "generation")

    def _unpin(self, ended):
        if ended is None:
            return
        assert ended.lease_id not in self.ended_at_s, "a lease ends once"
        self.ended_at_s[ended.lease_id] = self.owner.now_s
        self.pins.subtract(ended.pages)

    @invariant()
    def pins_and_leases_agree(self):
        assert min(self.pins.values(), default=0) >= 0
        assert self.owner.table.leased_pages == sum(count > 0 for count in self.pins.values())
        assert len(self.owner.table.revocable()) <= len(self.owner.table)

    @invariant()
    def granted_pages_keep_their_generation(self):
        for number in range(1, 60):  # more than a run grants
            for page in self.owner.table.pages(f"lease-{number}"):
                assert self.owner.generations[page.page] == page.generation


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_of_events = AnyOrder.TestCase
