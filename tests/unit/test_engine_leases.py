"""The owner's side of a hand-off: stock, leases, verdicts."""

import pytest
from engine_fakes import BLOCK, Replica, answer_of

from kvrelay.engine.pool import PageState
from kvrelay.engine.protocol import (
    Cancel,
    ConfirmLease,
    ExtendLeases,
    Failed,
    FirstToken,
    Granted,
    LeasePrefix,
    LeaseReply,
    PiecesFinal,
    ReleaseLeases,
    StateChanged,
)
from kvrelay.errors import Unavailable

PROMPT = list(range(1, 4 * BLOCK + 3))  # five pages, the last one half full


def reply(replica, command):
    replica.core.handle(command)
    [answer] = [event for event in replica.of(LeaseReply) if event.call_id == command.call_id]
    return answer


def confirm(replica, lease, call_id=1):
    return reply(replica, ConfirmLease(call_id=call_id, lease_id=lease.lease_id, pages=lease.pages))


def test_a_prefill_leases_from_held_tokens_on_with_the_tail():
    replica = Replica()
    replica.prefill("a", PROMPT, held_tokens=2 * BLOCK)
    replica.run()
    granted = replica.one(Granted)
    assert granted.lease.first_position == 2 * BLOCK
    assert [page.valid_tokens for page in granted.lease.pages] == [BLOCK, BLOCK, 2]
    assert replica.of(PiecesFinal)[-1].all
    told = replica.one(FirstToken)
    assert (told.position, told.computed_tokens) == (len(PROMPT), len(PROMPT))
    assert [told.token] == answer_of(PROMPT, max_tokens=1)
    assert replica.pool.count(PageState.LEASED) == 3


def test_a_forced_first_token_is_told_and_not_drawn():
    replica = Replica()
    replica.prefill("a", PROMPT, forced_next=300)
    replica.run()
    assert replica.one(FirstToken).token == 300


def test_what_is_cached_is_announced_at_once_and_leased_again():
    replica = Replica(chunk_tokens=1)
    replica.prefill("first", PROMPT)
    replica.run()
    replica.prefill("second", PROMPT)
    replica.core.step()
    assert replica.one(Granted, "second").cached_tokens == 4 * BLOCK
    assert replica.of(PiecesFinal, "second")[0].pages == 4
    first, second = (replica.one(Granted, job).lease.pages for job in ("first", "second"))
    assert first[:4] == second[:4]
    assert first[4].page != second[4].page


def test_full_pages_stay_cached_after_the_lease_and_the_tail_is_free():
    replica = Replica()
    replica.prefill("a", PROMPT)
    replica.run()
    assert confirm(replica, replica.one(Granted).lease).valid
    assert replica.pool.count(PageState.CACHED) == 4
    replica.at_rest()


class TestVerdict:
    def test_it_is_valid_while_no_page_was_reassigned_even_after_expiry(self):
        replica = Replica()
        replica.prefill("a", PROMPT, lease_ttl_s=5.0)
        replica.run()
        replica.clock.sleep(6.0)
        replica.run()
        replica.at_rest()
        assert confirm(replica, replica.one(Granted).lease).valid

    def test_it_is_invalid_once_a_page_was_reassigned(self):
        replica = Replica(pages=8)
        replica.prefill("a", PROMPT, lease_ttl_s=5.0)
        replica.run()
        replica.clock.sleep(6.0)
        replica.generate("other", [99] * 20, max_tokens=8)
        replica.run()
        answer = confirm(replica, replica.one(Granted).lease)
        assert (answer.valid, answer.reason) == (False, "generation")

    def test_leased_pages_are_never_reassigned(self):
        replica = Replica(pages=8)
        replica.prefill("a", PROMPT)
        replica.run()
        replica.generate("other", [99] * 20, max_tokens=8)
        replica.run()
        assert not replica.tokens("other")
        assert confirm(replica, replica.one(Granted).lease).valid
        replica.run()
        assert replica.tokens("other") == answer_of([99] * 20)

    def test_an_unknown_lease_is_invalid(self):
        answer = reply(Replica(), ConfirmLease(call_id=1, lease_id="no such lease", pages=()))
        assert (answer.valid, answer.reason) == (False, "unknown_lease")


class TestLife:
    def test_extending_keeps_a_lease_and_names_the_ended_ones(self):
        replica = Replica()
        replica.prefill("a", PROMPT, lease_ttl_s=5.0)
        replica.run()
        lease = replica.one(Granted).lease
        replica.clock.sleep(4.0)
        answer = reply(replica, ExtendLeases(call_id=7, lease_ids=(lease.lease_id, "gone"), ttl_s=5.0))
        assert answer.ended == ("gone",)
        replica.clock.sleep(4.0)
        replica.run()
        assert replica.pool.count(PageState.LEASED) == 5
        replica.clock.sleep(2.0)
        replica.run()
        assert replica.pool.count(PageState.LEASED) == 0

    def test_an_idle_engine_wakes_for_its_leases_and_tells_when_they_are_gone(self):
        replica = Replica()
        replica.prefill("a", PROMPT, lease_ttl_s=5.0)
        replica.run()
        assert replica.of(StateChanged)[-1].state.leases == 1
        assert replica.core.next_wake_s() <= 0.1
        replica.clock.sleep(6.0)
        replica.run()
        assert replica.of(StateChanged)[-1].state.leases == 0
        assert replica.core.next_wake_s() == float("inf")

    @pytest.mark.parametrize("how", ["expired", "released", "confirmed"])
    def test_a_prompt_whose_lease_ends_is_not_read_to_the_end(self, how):
        replica = Replica(chunk_tokens=1)
        replica.prefill("a", PROMPT, lease_ttl_s=5.0)
        replica.core.step()
        lease = replica.one(Granted).lease
        if how == "expired":
            replica.clock.sleep(6.0)
        elif how == "released":
            replica.core.handle(ReleaseLeases(lease_ids=(lease.lease_id, "unknown")))
        else:
            confirm(replica, lease)
        replica.run()
        assert isinstance(replica.one(Failed).error, Unavailable)
        assert replica.core._batches.steps <= 2
        replica.at_rest()

    @pytest.mark.parametrize("steps", range(7))
    def test_a_cancelled_prefill_frees_lease_and_pages_at_any_step(self, steps):
        replica = Replica(chunk_tokens=BLOCK)
        replica.prefill("a", PROMPT)
        for _ in range(steps):
            replica.core.step()
        replica.core.handle(Cancel(job_id="a"))
        for granted in replica.of(Granted):
            replica.core.handle(ReleaseLeases(lease_ids=(granted.lease.lease_id,)))
        replica.run()
        replica.at_rest()


class TestStock:
    def test_over_the_bound_prompts_wait_until_others_have_been_pulled(self):
        replica = Replica(pages=20, stock_share=0.5)
        for job in "abc":
            replica.prefill(job, [ord(job)] * len(PROMPT))
        replica.run()
        assert len(replica.of(FirstToken)) == 2
        confirm(replica, replica.one(Granted, "a").lease)
        replica.run()
        assert len(replica.of(FirstToken)) == 3

    def test_a_prompt_over_the_bound_is_read_alone(self):
        replica = Replica(pages=8, stock_share=0.5)
        replica.prefill("large", PROMPT)
        replica.core.step()
        replica.prefill("small", [7])
        replica.run()
        assert [event.job_id for event in replica.of(FirstToken)] == ["large"]
        confirm(replica, replica.one(Granted, "large").lease)
        replica.run()
        assert [event.job_id for event in replica.of(FirstToken)] == ["large", "small"]

    def test_waiting_prompts_do_not_hold_up_answers(self):
        replica = Replica(pages=20, stock_share=0.25)
        for job in "ab":
            replica.prefill(job, [ord(job)] * len(PROMPT))
        replica.generate("c", [7] * 5)
        replica.run()
        assert replica.tokens("c") == answer_of([7] * 5)


class TestPrefixes:
    def leased(self, replica, prompt, **options):
        keys = replica.prompt(prompt).block_keys
        fields = {"call_id": 9, "block_keys": keys, "skip_blocks": 0, "ttl_s": 5.0} | options
        return reply(replica, LeasePrefix(**fields))

    def warm(self, **options):
        replica = Replica(**options)
        replica.generate("warm", PROMPT, max_tokens=1)
        return replica.run()

    def test_the_longest_held_prefix_is_leased_at_once(self):
        replica = self.warm()
        lease = self.leased(replica, [*PROMPT[: 3 * BLOCK], 99, 99, 99, 99]).lease
        assert (lease.first_position, [page.valid_tokens for page in lease.pages]) == (0, [BLOCK] * 3)
        assert replica.pool.count(PageState.LEASED) == 3
        assert confirm(replica, lease).valid
        replica.at_rest()

    def test_what_the_puller_has_is_not_leased(self):
        lease = self.leased(self.warm(), PROMPT, skip_blocks=3).lease
        assert (lease.first_position, len(lease.pages)) == (3 * BLOCK, 1)

    @pytest.mark.parametrize("skip_blocks", [0, 4])
    def test_nothing_held_is_refused(self, skip_blocks):
        replica = self.warm()
        prompt = [99] * 8 if not skip_blocks else PROMPT
        assert self.leased(replica, prompt, skip_blocks=skip_blocks).reason == "not_held"

    def test_over_the_stock_bound_it_is_refused(self):
        replica = self.warm(pages=8, stock_share=0.5)
        assert self.leased(replica, PROMPT[: 2 * BLOCK]).lease
        replica.generate("other", [50] * 9, max_tokens=1)
        replica.run()
        assert self.leased(replica, [50] * 9, call_id=10, ttl_s=5.0).lease
        assert self.leased(replica, PROMPT, call_id=11).reason == "stock_bound"

    def test_pages_that_a_running_answer_counts_on_are_not_leased_away(self):
        replica = self.warm(pages=8)
        replica.generate("long", [50] * 9, max_tokens=20)
        replica.core.step()
        assert replica.pool.available == 1
        assert self.leased(replica, PROMPT).reason == "stock_bound"
        replica.run()
        assert replica.tokens("long") == answer_of([50] * 9, max_tokens=20)
