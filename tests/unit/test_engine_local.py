"""Answers written from prompts that are read on the same replica."""

import pytest
from engine_fakes import BLOCK, Replica, answer_of

from kvrelay.engine.protocol import (
    BlocksChanged,
    Cancel,
    ClearCache,
    Ended,
    EngineDied,
    Failed,
    Generate,
    Held,
    StateChanged,
    Stop,
)
from kvrelay.errors import DeadlineExceeded, InternalError, InvalidArgument, ResourceExhausted, Unavailable
from kvrelay.types import FinishReason, Sampling

PROMPT = list(range(1, 3 * BLOCK + 2))


def test_an_answer_is_told_token_by_token_and_ends_at_max_tokens():
    replica = Replica()
    replica.generate("a", PROMPT, max_tokens=5)
    replica.run()
    assert replica.one(Held).tokens == 0
    assert len(replica.tokens("a")) == 5
    ended = replica.one(Ended)
    assert ended.reason is FinishReason.LENGTH
    assert ended.usage.prompt_tokens == len(PROMPT)
    assert (ended.usage.cached_tokens, ended.usage.computed_tokens, ended.usage.output_tokens) == (0, len(PROMPT), 5)
    assert ended.usage.decode_computed_tokens == len(PROMPT)
    replica.at_rest()


@pytest.mark.parametrize("chunk_tokens", [1, 3, BLOCK, 1000])
def test_the_size_of_chunks_does_not_change_the_answer(chunk_tokens):
    replica = Replica(chunk_tokens=chunk_tokens)
    replica.generate("a", PROMPT)
    assert replica.run().tokens("a") == answer_of(PROMPT)


@pytest.mark.parametrize("page_tokens", [BLOCK, 2 * BLOCK])
@pytest.mark.parametrize(
    "length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1]
)
def test_a_second_ask_finds_whole_pages_but_always_computes_the_last_token(page_tokens, length):
    replica = Replica(page_tokens=page_tokens)
    prompt = PROMPT[:1] * length
    replica.generate("first", prompt)
    replica.run()
    replica.generate("second", prompt)
    replica.run()
    cached = (length - 1) // page_tokens * page_tokens
    assert replica.one(Held, "second").tokens == cached
    usage = replica.one(Ended, "second").usage
    assert (usage.cached_tokens, usage.computed_tokens) == (cached, length - cached)
    assert replica.tokens("second") == replica.tokens("first") == answer_of(prompt)
    replica.at_rest()


def test_written_pages_are_cached_too_so_that_the_next_turn_of_a_chat_finds_them():
    replica = Replica()
    replica.generate("first", PROMPT, max_tokens=9)
    replica.run()
    turn = PROMPT + replica.tokens("first") + [7]
    replica.generate("second", turn)
    replica.run()
    # The newest token of the first answer was never computed.
    assert replica.one(Ended, "second").usage.cached_tokens == (len(PROMPT) + 8) // BLOCK * BLOCK
    assert replica.tokens("second") == answer_of(turn)


def test_cached_blocks_are_told_once_and_by_all_their_keys():
    replica = Replica(page_tokens=2 * BLOCK)
    prompt = list(range(1, 4 * BLOCK + 2))
    replica.generate("a", prompt, max_tokens=1)
    replica.run()
    added = [key for event in replica.of(BlocksChanged) for key in event.added]
    keys = replica.prompt(prompt).block_keys
    assert b"".join(added) == keys
    replica.core.handle(ClearCache())
    assert set(replica.of(BlocksChanged)[-1].removed) == set(added)


def test_answers_run_side_by_side_as_they_would_alone():
    replica = Replica(max_sequences=3)
    prompts = {f"job{i}": [i + 1, *PROMPT] for i in range(7)}
    for job_id, prompt in prompts.items():
        replica.generate(job_id, prompt)
    replica.run()
    for job_id, prompt in prompts.items():
        assert replica.tokens(job_id) == answer_of(prompt)
    replica.at_rest()


def test_equal_prompts_at_once_share_their_pages_in_the_end():
    replica = Replica()
    for job_id in ("a", "b"):
        replica.generate(job_id, PROMPT, max_tokens=4 * BLOCK)
    for _ in range(6):
        replica.core.step()
    jobs = replica.core._parts.jobs
    tables = [list(job.sequence.pages) for job in jobs.values()]
    assert tables[0][:3] == tables[1][:3]
    replica.run()
    assert replica.tokens("a") == replica.tokens("b")
    replica.at_rest()


class TestContinuation:
    def test_it_writes_what_is_missing(self):
        whole = answer_of(PROMPT)
        replica = Replica()
        replica.generate("a", PROMPT, output=whole[:3])
        replica.run()
        assert replica.tokens("a") == whole[3:]
        usage = replica.one(Ended).usage
        assert (usage.prompt_tokens, usage.output_tokens) == (len(PROMPT), len(whole))

    def test_a_forced_token_is_taken_and_not_told_again(self):
        whole = answer_of(PROMPT)
        replica = Replica()
        replica.generate("a", PROMPT, output=whole[:3], forced_next=whole[3])
        replica.run()
        assert replica.tokens("a") == whole[4:]

    def test_another_forced_token_changes_what_follows(self):
        whole = answer_of(PROMPT)
        other = whole[0] + 1
        replica = Replica()
        replica.generate("a", PROMPT, forced_next=other)
        replica.run()
        assert replica.tokens("a") == answer_of([*PROMPT, other], max_tokens=7)

    def test_a_complete_answer_ends_at_once(self):
        replica = Replica()
        replica.generate("full", PROMPT, output=[5, 6, 7], max_tokens=3)
        replica.generate("forced", PROMPT, output=[5, 6], forced_next=7, max_tokens=3)
        replica.generate("stopped", PROMPT, output=[5, 0], max_tokens=9)
        assert [e.reason for e in replica.of(Ended)] == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.STOP]
        replica.run()
        assert replica.core._batches.steps == 0
        replica.at_rest()


class TestEnds:
    def test_a_stop_id_ends_the_answer_and_is_told(self):
        whole = answer_of(PROMPT)
        replica = Replica()
        replica.generate("a", PROMPT, sampling=Sampling(max_tokens=8, stop_ids=(whole[2],)))
        replica.run()
        assert replica.tokens("a") == whole[:3]
        ended = replica.one(Ended)
        assert (ended.reason, ended.stop_id) == (FinishReason.STOP, whole[2])

    def test_a_stop_id_within_min_tokens_does_not_end_it(self):
        whole = answer_of(PROMPT)
        replica = Replica()
        replica.generate("a", PROMPT, sampling=Sampling(max_tokens=8, min_tokens=5, stop_ids=tuple(whole)))
        replica.run()
        assert len(replica.tokens("a")) >= 5

    def test_the_models_own_end_counts_unless_it_is_ignored(self):
        replica = Replica(mock_profile="eos_every=1")
        replica.generate("ends", PROMPT)
        replica.generate("goes on", PROMPT, sampling=Sampling(max_tokens=3, ignore_eos=True))
        replica.run()
        assert replica.one(Ended, "ends").stop_id == 0
        assert replica.one(Ended, "goes on").reason is FinishReason.LENGTH

    def test_the_pool_bounds_the_context(self):
        replica = Replica(pages=4)
        replica.generate("a", PROMPT, sampling=Sampling())
        replica.run()
        assert replica.one(Ended).reason is FinishReason.CONTEXT
        assert len(PROMPT) + len(replica.tokens("a")) == 4 * BLOCK
        replica.at_rest()

    def test_a_seed_fixes_a_sampled_answer(self):
        answers = [answer_of(PROMPT, sampling=Sampling(temperature=1.0, seed=seed, max_tokens=8)) for seed in (1, 1, 2)]
        assert answers[0] == answers[1] != answers[2]


class TestBadInput:
    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("prompt_ids", {"ids": []}),
            ("prompt_ids", {"ids": [512]}),
            ("prompt_ids", {"ids": [1] * 64 * BLOCK}),
            ("output_ids", {"output": [9999]}),
            ("forced_next", {"forced_next": 512}),
            ("sampling.temperature", {"sampling": Sampling(temperature=float("nan"))}),
            ("sampling.max_tokens", {"max_tokens": 0}),
        ],
    )
    def test_it_is_refused_with_the_fields_name(self, field, change):
        replica = Replica(pages=64)
        replica.generate("a", **{"ids": PROMPT} | change)
        error = replica.one(Failed).error
        assert isinstance(error, InvalidArgument)
        assert error.field == field
        assert not replica.of(Held)
        replica.at_rest()

    def test_keys_must_match_the_tokens(self):
        replica = Replica()
        for name, keys in (("few", b""), ("odd", b"123")):
            prompt = replica.prompt(PROMPT)
            bad = type(prompt)(prompt_ids=prompt.prompt_ids, root_key=prompt.root_key, block_keys=keys)
            replica.core.handle(Generate(job_id=name, prompt=bad, sampling=Sampling()))
            assert replica.one(Failed, name).error.field == "block_keys"

    def test_a_running_jobs_id_is_not_taken_twice(self):
        replica = Replica()
        replica.generate("a", PROMPT)
        replica.generate("a", PROMPT)
        assert replica.one(Failed).error.field == "job_id"
        replica.run()
        assert replica.tokens("a") == answer_of(PROMPT)


class TestRoom:
    def test_a_job_waits_until_its_whole_sequence_fits(self):
        replica = Replica(pages=8)
        replica.generate("first", [1] * 10, max_tokens=10)  # 5 pages
        replica.generate("second", [2] * 10, max_tokens=10)
        replica.core.step()
        assert {job.job_id: job.phase.name for job in replica.core._parts.jobs.values()} == {
            "first": "RUNNING",
            "second": "QUEUED",
        }
        replica.run()
        assert replica.tokens("second") == answer_of([2] * 10, max_tokens=10)
        replica.at_rest()

    def test_the_waiting_queue_is_bounded(self):
        replica = Replica(queue_jobs=2)
        for job_id in "abc":
            replica.generate(job_id, PROMPT)
        assert isinstance(replica.one(Failed, "c").error, ResourceExhausted)
        replica.run()
        assert len(replica.of(Ended)) == 2

    def test_cached_pages_make_room_least_recently_used_first(self):
        replica = Replica(pages=8)
        for start in range(1, 200, 40):
            replica.generate(f"job{start}", range(start, start + 20), max_tokens=4)
            replica.run()
        assert any(event.removed for event in replica.of(BlocksChanged))
        assert len(replica.of(Ended)) == 5
        replica.at_rest()


class TestCancel:
    @pytest.mark.parametrize("steps", range(8))
    def test_at_any_step_it_frees_everything_and_says_nothing(self, steps):
        replica = Replica(chunk_tokens=BLOCK)
        replica.generate("a", PROMPT, max_tokens=20)
        for _ in range(steps):
            replica.core.step()
        told = len(replica.of(Ended)) + len(replica.of(Failed))
        replica.core.handle(Cancel(job_id="a"))
        replica.core.handle(Cancel(job_id="a"))
        replica.run()
        assert told == len(replica.of(Ended)) + len(replica.of(Failed)) == 0
        replica.at_rest()

    def test_an_unknown_job_is_ignored(self):
        Replica().core.handle(Cancel(job_id="nobody"))

    def test_a_deadline_ends_a_job_wherever_it_is(self):
        replica = Replica(max_sequences=1)
        replica.generate("running", PROMPT, max_tokens=40, deadline_at_s=replica.clock.now_s + 1)
        replica.generate("waiting", PROMPT, max_tokens=40, deadline_at_s=replica.clock.now_s + 1)
        replica.core.step()
        assert replica.core.next_wake_s() == pytest.approx(1.0)
        replica.clock.sleep(1.5)
        replica.run()
        assert all(isinstance(replica.one(Failed, job).error, DeadlineExceeded) for job in ("running", "waiting"))
        replica.at_rest()

    def test_stop_fails_what_runs_as_unavailable(self):
        replica = Replica()
        replica.generate("a", PROMPT)
        replica.core.step()
        replica.core.handle(Stop())
        assert isinstance(replica.one(Failed).error, Unavailable)
        assert replica.core.ended
        assert not replica.core.step()


class TestBrokenModel:
    def test_a_failed_step_fails_its_jobs_and_no_others(self, caplog):
        replica = Replica()
        whole_run = replica.runner.run
        replica.runner.run = lambda _: 1 / 0
        replica.generate("a", PROMPT)
        replica.core.step()
        error = replica.one(Failed, "a").error
        assert isinstance(error, InternalError)
        assert "division" not in str(error)
        assert "step_failed" in caplog.text
        replica.runner.run = whole_run
        replica.generate("b", PROMPT)
        replica.run()
        assert replica.tokens("b") == answer_of(PROMPT)
        replica.at_rest()

    def test_three_failed_steps_in_a_row_end_the_engine(self):
        replica = Replica()
        replica.runner.run = lambda _: 1 / 0
        for job_id in "abc":
            replica.generate(job_id, PROMPT)
            replica.core.step()
        assert "ZeroDivisionError" in replica.one(EngineDied).detail
        assert replica.core.ended

    def test_wrong_bytes_in_the_pool_are_seen(self):
        replica = Replica()
        replica.generate("a", PROMPT, max_tokens=20)
        for _ in range(3):
            replica.core.step()
        job = replica.core._parts.jobs["a"]
        replica.runner._kv[job.sequence.pages[1]] = 0
        replica.run()
        assert isinstance(replica.one(Failed).error, InternalError)


def test_the_state_tells_load_speed_and_rest():
    replica = Replica(mock_profile="prefill_ms_per_token=1,step_ms=10")
    replica.generate("a", PROMPT, max_tokens=4)
    replica.run()
    busy = replica.of(StateChanged)[0].state
    assert (busy.running, busy.waiting) == (1, 0)
    idle = replica.of(StateChanged)[-1].state
    assert (idle.running, idle.waiting, idle.prefill_tokens, idle.decode_tokens) == (0, 0, 0, 0)
    assert idle.pages_free == idle.pages_total == 64
    assert idle.steps == 4
    assert idle.step_s == pytest.approx(0.010)
    assert idle.prefill_tokens_per_s == pytest.approx(len(PROMPT) / (0.010 + 0.001 * len(PROMPT)))
