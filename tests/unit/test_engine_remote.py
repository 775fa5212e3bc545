"""Prompts that are read on one replica and pulled by another."""

import pytest
from engine_fakes import BLOCK, Fleet, Replica, answer_of

from kvrelay.engine.pool import PageState
from kvrelay.engine.protocol import (
    AttachLease,
    Cancel,
    Ended,
    Failed,
    FirstToken,
    FirstTokenKnown,
    Granted,
    Held,
    PiecesFinal,
    PiecesReady,
    Pulled,
    PullFailed,
    ReadLocally,
    Tokens,
    Verdict,
)
from kvrelay.errors import InternalError, InvalidArgument
from kvrelay.types import FinishReason, Sampling

PROMPT = list(range(1, 6 * BLOCK + 2))


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1])
@pytest.mark.parametrize("page_tokens", [BLOCK, 2 * BLOCK])
def test_a_remote_answer_equals_a_local_one_and_decode_computes_nothing_of_the_prompt(length, page_tokens):
    options = {"page_tokens": page_tokens, "chunk_tokens": 6}
    fleet = Fleet(decode=options, prefill=options)
    fleet.ask("a", PROMPT[:length])
    fleet.run()
    assert fleet.answers["a"] == answer_of(PROMPT[:length])
    usage = fleet.ended["a"].usage
    assert (usage.pulled_tokens, usage.cached_tokens, usage.decode_computed_tokens) == (length, 0, 0)
    assert usage.computed_tokens == length
    assert usage.pulled_bytes == -(-length // page_tokens) * page_tokens * 64
    fleet.at_rest()


def test_pieces_are_pulled_while_the_rest_is_computed():
    fleet = Fleet(prefill={"chunk_tokens": BLOCK})
    fleet.ask("a", PROMPT)
    fleet.run()
    assert [e.pages for e in fleet.prefill.of(PiecesFinal)] == [1, 2, 3, 4, 5, 6, 7]
    assert len(fleet.network.reads) > 3


def test_only_what_decode_lacks_is_leased_and_pulled():
    fleet = Fleet()
    fleet.ask("first", PROMPT)
    fleet.run()
    fleet.ask("second", [*PROMPT[: 4 * BLOCK], 99, 98, 97, 96, 95])
    fleet.run()
    assert fleet.decode.one(Held, "second").tokens == 4 * BLOCK
    assert len(fleet.prefill.one(Granted, "second").lease.pages) == 2
    usage = fleet.ended["second"].usage
    assert (usage.cached_tokens, usage.pulled_tokens, usage.prefill_cached_tokens) == (4 * BLOCK, 5, 4 * BLOCK)
    assert fleet.answers["second"] == answer_of([*PROMPT[: 4 * BLOCK], 99, 98, 97, 96, 95])
    fleet.at_rest()


def test_pulled_pages_are_cached_only_after_the_verdict():
    fleet = Fleet()
    fleet.ask("a", PROMPT, max_tokens=30)
    fleet.paused.add(("a", Pulled))
    fleet.run(until=lambda: fleet.decode.of(Pulled))
    for _ in range(5):
        fleet.pump()
    assert not fleet.decode.of(Tokens)
    assert len(fleet.decode.core._parts.cache) == 0
    pulled = fleet.decode.one(Pulled)
    fleet.decode.core.handle(Verdict(job_id="a", lease_id=pulled.lease_id, valid=True))
    assert len(fleet.decode.core._parts.cache) == 6
    fleet.run()
    assert fleet.answers["a"] == answer_of(PROMPT, max_tokens=30)


class TestLostPulls:
    def test_an_invalid_verdict_drops_what_was_pulled_and_waits_for_orders(self):
        fleet = Fleet()
        fleet.ask("a", PROMPT)
        fleet.paused.add(("a", Pulled))
        fleet.run(until=lambda: fleet.decode.of(Pulled))
        decode = fleet.decode
        lease_id = decode.one(Pulled).lease_id
        decode.core.handle(Verdict(job_id="a", lease_id="another", valid=False))
        assert decode.pool.count(PageState.ACTIVE) == 7
        decode.core.handle(Verdict(job_id="a", lease_id=lease_id, valid=False))
        assert decode.pool.count(PageState.ACTIVE) == 0
        assert len(decode.core._parts.cache) == 0
        decode.core.handle(ReadLocally(job_id="a"))
        fleet.run()
        assert fleet.answers["a"] == answer_of(PROMPT)
        assert fleet.ended["a"].usage.decode_computed_tokens == len(PROMPT)
        fleet.at_rest()

    @pytest.mark.parametrize("point", ["granted", "reading"])
    def test_an_invalid_verdict_gives_up_a_lease_that_is_not_pulled_yet(self, point):
        fleet = Fleet(prefill={"chunk_tokens": BLOCK})
        fleet.network.held = True
        fleet.ask("a", PROMPT)
        fleet.run(until=lambda: CANCEL_POINTS[point](fleet))
        lease_id = fleet.prefill.one(Granted).lease.lease_id
        fleet.decode.core.handle(Verdict(job_id="a", lease_id=lease_id, valid=False))
        fleet.decode.core.check_integrity()
        assert fleet.decode.pool.count(PageState.ACTIVE) == fleet.decode.pool.reserved == 0
        fleet.network.held = False
        fleet.decode.core.handle(ReadLocally(job_id="a"))
        fleet.run()
        fleet.at_rest()

    def test_a_failed_read_is_told_with_its_reason_and_the_prompt_is_read_locally(self):
        fleet = Fleet()
        fleet.network.failing = True
        fleet.ask("a", PROMPT)
        fleet.run()
        assert fleet.decode.one(PullFailed).reason == "disconnected"
        assert fleet.answers["a"] == answer_of(PROMPT)
        fleet.at_rest()

    def test_a_stuck_read_times_out_and_its_pages_stay_in_quarantine_until_it_lands(self):
        fleet = Fleet(decode={"pull_timeout_s": 2.0})
        fleet.network.held = True
        fleet.ask("a", PROMPT)
        fleet.run(until=lambda: fleet.network.reads)
        fleet.clock.sleep(3.0)
        fleet.run()
        assert fleet.decode.one(PullFailed).reason == "timeout"
        assert fleet.answers["a"] == answer_of(PROMPT)
        [read, *_] = fleet.network.reads
        assert read.abandoned
        assert fleet.decode.pool.count(PageState.QUARANTINED) == sum(len(r.copies) for r in fleet.network.reads)
        fleet.decode.generate("b", PROMPT[::-1], max_tokens=20)
        fleet.pump()
        for read in fleet.network.reads:
            read.land()
        fleet.decode.run()
        assert fleet.decode.tokens("b") == answer_of(PROMPT[::-1], max_tokens=20)
        fleet.at_rest()

    def test_reads_that_make_progress_do_not_time_out(self):
        fleet = Fleet(decode={"pull_timeout_s": 2.0}, prefill={"chunk_tokens": BLOCK})
        fleet.network.polls = 1
        fleet.ask("a", PROMPT)
        while "a" not in fleet.ended:
            fleet.pump()
            fleet.clock.sleep(1.0)
        assert not fleet.decode.of(PullFailed)

    def test_waiting_for_pieces_is_no_lack_of_progress(self):
        fleet = Fleet(decode={"pull_timeout_s": 2.0}, prefill={"chunk_tokens": BLOCK})
        fleet.ask("a", PROMPT)
        fleet.run(until=lambda: fleet.network.reads and fleet.network.reads[0].closed)
        for read in fleet.network.reads:
            read.land()
        for _ in range(5):
            fleet.decode.core.step()
            fleet.clock.sleep(3.0)
            fleet.decode.core.step()
        assert not fleet.decode.of(PullFailed)

    def test_the_next_alternate_is_pulled_after_the_first_has_failed(self):
        fleet = Fleet()
        other = Replica("other", network=fleet.network, clock=fleet.clock)
        fleet.paused.add(("a", PullFailed))
        fleet.network.failing = True
        fleet.ask("a", PROMPT)
        fleet.run(until=lambda: fleet.decode.of(PullFailed) and fleet.prefill.of(FirstToken))
        fleet.network.failing = False
        first = fleet.answers["a"][0]
        other.prefill("a", PROMPT, forced_next=first)
        other.run()
        assert other.one(FirstToken).token == first
        lease = other.one(Granted).lease
        fleet.decode.core.handle(AttachLease(job_id="a", lease=lease, source=other.agent))
        fleet.decode.core.handle(PiecesReady(job_id="a", lease_id=lease.lease_id, pages=7, all=True))
        fleet.decode.core.handle(FirstTokenKnown(job_id="a", token=first))
        fleet.paused.add(("a", Pulled))
        fleet.run(until=lambda: fleet.decode.of(Pulled))
        fleet.decode.core.handle(Verdict(job_id="a", lease_id=lease.lease_id, valid=True))
        fleet.run()
        assert fleet.answers["a"] == answer_of(PROMPT)

    def test_a_token_that_was_told_is_forced_when_the_prompt_is_read_locally(self):
        fleet = Fleet(prefill={"chunk_tokens": BLOCK})
        fleet.paused.add(("a", PullFailed))
        fleet.network.failing = True
        fleet.ask("a", PROMPT)
        fleet.run(until=lambda: fleet.decode.of(PullFailed))
        fleet.decode.core.handle(FirstTokenKnown(job_id="a", token=300))
        fleet.decode.core.handle(ReadLocally(job_id="a"))
        fleet.decode.run()
        assert fleet.decode.tokens("a") == answer_of([*PROMPT, 300], max_tokens=7)
        assert fleet.decode.of(Tokens)[0].position == len(PROMPT) + 1

    @pytest.mark.parametrize("fault", ["layout", "gap", "short"])
    def test_a_lease_that_does_not_fit_is_refused_in_a_word(self, fault):
        prefill, decode = Replica("prefill", page_tokens=2 * BLOCK if fault == "layout" else BLOCK), Replica("decode")
        held = BLOCK if fault == "gap" else 0
        prefill.prefill("a", PROMPT[:-1] if fault == "short" else PROMPT, held_tokens=held)
        prefill.run()
        decode.generate("a", PROMPT, remote=True)
        decode.core.handle(AttachLease(job_id="a", lease=prefill.one(Granted).lease, source=prefill.agent))
        assert decode.one(PullFailed).reason == fault


class TestEndsWithTheFirstToken:
    @pytest.mark.parametrize("why", ["length", "stop", "eos"])
    def test_the_lease_is_freed_unpulled(self, why):
        [first] = answer_of(PROMPT, max_tokens=1)
        sampling = Sampling(max_tokens=1 if why == "length" else 9, stop_ids=(first,) if why == "stop" else ())
        prefill = Replica(mock_profile="eos_every=1" if why == "eos" else "")
        prefill.prefill("a", PROMPT, sampling=sampling)
        prefill.run()
        told = prefill.one(FirstToken)
        assert told.finish_reason is (FinishReason.LENGTH if why == "length" else FinishReason.STOP)
        prefill.at_rest()

    def test_decode_ends_the_answer_as_soon_as_it_knows_the_token(self):
        fleet = Fleet()
        fleet.ask("a", PROMPT, max_tokens=1)
        fleet.run()
        assert fleet.ended["a"].reason is FinishReason.LENGTH
        assert fleet.answers["a"] == answer_of(PROMPT, max_tokens=1)
        assert fleet.ended["a"].usage.output_tokens == 1
        fleet.at_rest()


def test_no_token_is_told_before_the_first_one_is_known_even_if_it_was_forced():
    fleet = Fleet()
    whole = answer_of(PROMPT)
    fleet.paused.add(("a", Pulled))
    fleet.requests["a"] = (PROMPT, Sampling(max_tokens=8))
    fleet.decode.generate("a", PROMPT, forced_next=whole[0], remote=True)
    fleet.prefill.prefill("a", PROMPT, forced_next=whole[0])
    fleet.prefill.run()
    granted, decode = fleet.prefill.one(Granted), fleet.decode.core
    decode.handle(AttachLease(job_id="a", lease=granted.lease, source=fleet.prefill.agent))
    decode.handle(PiecesReady(job_id="a", lease_id=granted.lease.lease_id, pages=7, all=True))
    for _ in range(4):
        decode.step()
    decode.handle(Verdict(job_id="a", lease_id=granted.lease.lease_id, valid=True))
    fleet.decode.run()
    assert not fleet.decode.of(Tokens)
    decode.handle(FirstTokenKnown(job_id="a", token=whole[0]))
    assert fleet.decode.run().tokens("a") == whole[1:]


def test_a_continued_answer_is_pulled_with_the_output_so_far():
    whole = answer_of(PROMPT)
    fleet = Fleet()
    prefill, decode = fleet.prefill, fleet.decode
    sampling = Sampling(max_tokens=8)
    decode.generate("a", PROMPT, output=whole[:3], sampling=sampling, remote=True)
    prefill.prefill("a", PROMPT, output=whole[:3], sampling=sampling, forced_next=whole[3])
    fleet.requests["a"] = (PROMPT, sampling)
    decode.new_events()
    fleet.run()
    assert fleet.answers["a"] == whole[3:]


class TestRoomAtDecode:
    def test_a_granted_prompt_waits_under_its_lease_until_there_is_room(self):
        fleet = Fleet(decode={"pages": 10})
        fleet.decode.generate("busy", [9] * 20, max_tokens=12)
        fleet.ask("a", PROMPT)
        for _ in range(4):
            fleet.pump()
        assert not fleet.network.reads
        fleet.run()
        assert fleet.answers["a"] == answer_of(PROMPT)
        fleet.at_rest()

    def test_nobody_holds_room_while_waiting_for_a_lease(self):
        decode = Replica(pages=10)
        decode.generate("a", PROMPT, remote=True)
        decode.generate("b", PROMPT[::-1])
        decode.run()
        assert len(decode.tokens("b")) == 8

    def test_pinned_prefixes_of_waiting_jobs_never_lock_everybody_out(self):
        decode = Replica(pages=12)
        prompts = {"a": [1] * 4 * BLOCK, "b": [2] * 4 * BLOCK}
        for job_id, prompt in prompts.items():
            decode.generate(f"warm {job_id}", prompt, max_tokens=2)
            decode.run()
        for job_id, prompt in prompts.items():
            decode.generate(job_id, [*prompt, 5, 6, 7], max_tokens=20, remote=True)
            assert decode.one(Held, job_id).tokens == 4 * BLOCK
        for job_id in prompts:
            decode.core.handle(ReadLocally(job_id=job_id))
        decode.run()
        for job_id, prompt in prompts.items():
            assert decode.tokens(job_id) == answer_of([*prompt, 5, 6, 7], max_tokens=20)
        decode.at_rest()

    def test_a_lease_that_builds_on_a_prefix_taken_meanwhile_is_told_as_evicted(self):
        fleet = Fleet(decode={"pages": 12})
        decode = fleet.decode
        for value in (1, 2):
            decode.generate(f"warm {value}", [value] * 4 * BLOCK, max_tokens=2)
            decode.run()
        decode.new_events()
        fleet.ask("a", [1] * 4 * BLOCK + [5, 6, 7], max_tokens=20)
        fleet.ask("b", [2] * 4 * BLOCK + [5, 6, 7], max_tokens=20)
        fleet.run()
        assert [event.reason for event in decode.of(PullFailed)] == ["evicted"]
        for value, job_id in ((1, "a"), (2, "b")):
            assert fleet.answers[job_id] == answer_of([value] * 4 * BLOCK + [5, 6, 7], max_tokens=20)
        fleet.at_rest()


CANCEL_POINTS = {
    "held": lambda fleet: fleet.decode.of(Held),
    "granted": lambda fleet: fleet.prefill.of(Granted),
    "reading": lambda fleet: fleet.network.reads,
    "first token": lambda fleet: fleet.prefill.of(FirstToken),
    "pulled": lambda fleet: fleet.decode.of(Pulled),
    "streaming": lambda fleet: fleet.decode.of(Tokens),
}


class TestCancel:
    @pytest.mark.parametrize("point", CANCEL_POINTS)
    @pytest.mark.parametrize("held", [False, True])
    def test_in_every_phase_both_pools_come_back_to_their_baseline(self, point, held):
        fleet = Fleet(prefill={"chunk_tokens": BLOCK})
        fleet.ask("a", PROMPT, max_tokens=30)
        fleet.run(until=lambda: CANCEL_POINTS[point](fleet))
        fleet.network.held = held
        pending = [read for read in fleet.network.reads if not read.closed]
        fleet.cancel("a")
        fleet.decode.core.step()
        fleet.decode.core.check_integrity()
        if held and pending:
            assert fleet.decode.pool.count(PageState.QUARANTINED) == sum(len(read.copies) for read in pending)
        fleet.network.held = False
        for _ in range(5):
            fleet.pump()
        # Nothing waits for a lease to expire.
        fleet.prefill.at_rest()
        fleet.decode.at_rest()
        assert not fleet.decode.of(Ended)
        assert not fleet.decode.of(Failed)

    def test_a_read_that_lands_after_its_pages_were_asked_for_again_hurts_nobody(self):
        fleet = Fleet(decode={"pages": 16})
        fleet.network.held = True
        fleet.ask("a", PROMPT)
        fleet.run(until=lambda: fleet.network.reads)
        fleet.decode.core.handle(Cancel(job_id="a"))
        fleet.ended["a"] = "cancelled"
        fleet.decode.generate("b", [7] * 20, max_tokens=12)
        fleet.decode.core.step()
        for read in fleet.network.reads:
            read.land()
        fleet.decode.run()
        assert fleet.decode.tokens("b") == answer_of([7] * 20, max_tokens=12)
        fleet.at_rest()

    def test_a_cancelled_read_that_stays_stuck_is_abandoned(self):
        fleet = Fleet(decode={"pull_timeout_s": 2.0})
        fleet.network.held = True
        fleet.ask("a", PROMPT)
        fleet.run(until=lambda: fleet.network.reads)
        fleet.cancel("a")
        fleet.decode.core.step()
        assert not fleet.network.reads[0].abandoned
        fleet.clock.sleep(3.0)
        fleet.decode.core.step()
        assert fleet.network.reads[0].abandoned
        assert fleet.decode.core.next_wake_s() == pytest.approx(0.001)


def test_bad_input_of_a_prefill_is_refused_with_the_fields_name():
    prefill = Replica()
    cases = {
        "prompt_ids": {"ids": []},
        "held_tokens": {"held_tokens": 3},
        "output_ids": {"output": [1, 2, 3], "max_tokens": 3},
        "lease_ttl_s": {"lease_ttl_s": 0.0},
        "forced_next": {"forced_next": -1},
    }
    for field, change in cases.items():
        prefill.prefill(field, **{"ids": PROMPT} | change)
        error = prefill.one(Failed, field).error
        assert isinstance(error, InvalidArgument)
        assert error.field == field
    prefill.prefill("whole prompt held", PROMPT[:-1], held_tokens=6 * BLOCK)
    assert prefill.one(Failed, "whole prompt held").error.field == "held_tokens"
    prefill.at_rest()


def test_a_broken_model_at_prefill_frees_the_lease():
    prefill = Replica()
    prefill.runner.run = lambda _: 1 / 0
    prefill.prefill("a", PROMPT)
    prefill.core.step()
    assert isinstance(prefill.one(Failed).error, InternalError)
    prefill.at_rest()
