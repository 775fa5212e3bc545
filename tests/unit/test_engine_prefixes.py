"""The engine pulls a prefix that another replica holds into its cache before the job that wants it queues."""

import itertools
import random
from dataclasses import replace

import pytest
from engine_fakes import BLOCK, Clock, Network, Replica, answer_of

from kvrelay.engine.pool import PageState
from kvrelay.engine.protocol import (
    AttachLease,
    Cancel,
    ConfirmLease,
    Ended,
    Failed,
    FirstToken,
    Granted,
    Held,
    LeasePrefix,
    LeaseReply,
    PiecesFinal,
    Pulled,
    PullFailed,
    ReadLocally,
    ReleaseLeases,
    Verdict,
)

PROMPT = list(range(1, 8 * BLOCK + 3))
HELD = 8 * BLOCK
CALLS = itertools.count(1)


class Pair:
    """A replica that holds the prompt, one that reads it, and the messages between them."""

    def __init__(self, *, ids=PROMPT, holder=None, reader=None):
        clock, self.network = Clock(), Network()
        self.clock = clock
        self.holder = Replica("holder", network=self.network, clock=clock, **(holder or {}))
        self.reader = Replica("reader", network=self.network, clock=clock, **(reader or {}))
        self.holder.generate("warm", ids, max_tokens=1)
        self.holder.run()

    def ask(self, job_id="job", ids=PROMPT, *, prefix_tokens=HELD, **options):
        self.reader.generate(job_id, ids, prefix_tokens=prefix_tokens, **options)

    def reply(self, command):
        self.holder.core.handle(command)
        return next(e for e in reversed(self.holder.events) if isinstance(e, LeaseReply))

    def lease(self, ids=PROMPT, *, skip_blocks=0):
        keys = self.holder.prompt(ids).block_keys
        return self.reply(LeasePrefix(call_id=next(CALLS), block_keys=keys, skip_blocks=skip_blocks, ttl_s=30.0)).lease

    def attach(self, lease, job_id="job", source=None):
        self.reader.core.handle(AttachLease(job_id=job_id, lease=lease, source=source or self.holder.agent))

    def confirm(self, job_id="job", *, valid=None):
        told = self.reader.one(Pulled, job_id)
        said = self.reply(ConfirmLease(call_id=next(CALLS), lease_id=told.lease_id, pages=told.pages)).valid
        verdict = Verdict(job_id=job_id, lease_id=told.lease_id, valid=said if valid is None else valid)
        self.reader.core.handle(verdict)

    def bring(self, job_id="job"):
        lease = self.lease()
        self.attach(lease, job_id)
        self.reader.run()
        self.poll()
        self.confirm(job_id)
        return lease

    def poll(self):
        for _ in range(5):
            self.reader.core.step()

    def release(self, lease):
        self.holder.core.handle(ReleaseLeases(lease_ids=(lease.lease_id,)))

    def at_rest(self):
        self.poll()
        self.holder.at_rest()
        self.reader.at_rest()


def test_a_prefix_is_pulled_cached_and_not_computed():
    pair = Pair()
    pair.ask()
    held = pair.reader.one(Held, "job")
    assert held.tokens == 0
    assert held.prefix_s > 0
    pair.bring()
    pair.reader.run()
    usage = pair.reader.one(Ended, "job").usage
    assert pair.reader.tokens("job") == answer_of(PROMPT)
    assert (usage.cached_tokens, usage.pulled_tokens, usage.computed_tokens) == (0, HELD, 2)
    assert usage.pulled_bytes == HELD * 64
    pair.ask("again")
    assert pair.reader.one(Held, "again") == Held(job_id="again", tokens=HELD)
    pair.reader.run()
    pair.at_rest()


def test_a_prefill_leases_on_what_it_pulled():
    pair = Pair()
    pair.reader.prefill("job", PROMPT, prefix_tokens=HELD, held_tokens=2 * BLOCK)
    assert not pair.reader.of(Granted)
    pair.bring()
    pair.reader.run()
    granted = pair.reader.one(Granted, "job")
    assert (granted.cached_tokens, granted.pulled_tokens, granted.pulled_bytes) == (0, HELD, HELD * 64)
    assert granted.lease.first_position == 2 * BLOCK
    assert pair.reader.of(PiecesFinal, "job")[-1].all
    assert pair.reader.one(FirstToken, "job").computed_tokens == 2
    pair.reader.core.handle(ReleaseLeases(lease_ids=(granted.lease.lease_id,)))
    pair.at_rest()


def test_nobody_waits_for_a_prefix_that_is_here_or_that_is_of_no_use():
    pair = Pair()
    for number, tokens in enumerate((0, BLOCK - 1)):
        pair.ask(f"job{number}", PROMPT, prefix_tokens=tokens)
        assert pair.reader.one(Held, f"job{number}").prefix_s is None
    pair.reader.run()
    pair.ask("whole", PROMPT[: 2 * BLOCK], prefix_tokens=2 * BLOCK)  # its last token is always computed
    assert pair.reader.one(Held, "whole").prefix_s is None
    pair.reader.run()
    pair.at_rest()


def test_only_what_is_lacking_is_pulled():
    pair = Pair()
    pair.reader.generate("part", PROMPT[: 3 * BLOCK + 1], max_tokens=1)
    pair.reader.run()
    pair.ask()
    assert pair.reader.one(Held, "job").tokens == 3 * BLOCK
    pair.bring()
    pair.reader.run()
    usage = pair.reader.one(Ended, "job").usage
    assert (usage.cached_tokens, usage.pulled_tokens, usage.computed_tokens) == (3 * BLOCK, 5 * BLOCK, 2)
    assert usage.pulled_bytes == 5 * BLOCK * 64
    pair.at_rest()


def test_pages_of_several_blocks():
    pages = {"page_tokens": 2 * BLOCK}
    pair = Pair(holder=pages, reader=pages)
    pair.reader.generate("part", PROMPT[: 3 * BLOCK + 1], max_tokens=1)
    pair.reader.run()
    pair.ask(prefix_tokens=7 * BLOCK)
    assert pair.reader.one(Held, "job").tokens == 2 * BLOCK
    pair.bring()
    pair.reader.run()
    assert pair.reader.tokens("job") == answer_of(PROMPT)
    assert pair.reader.one(Ended, "job").usage.pulled_tokens == 6 * BLOCK
    pair.at_rest()


@pytest.mark.parametrize("ends", ["read_locally", "invalid", "failing"])
def test_without_the_prefix_the_job_computes(ends):
    pair = Pair()
    pair.network.failing = ends == "failing"
    pair.ask()
    if ends == "read_locally":
        pair.reader.core.handle(ReadLocally(job_id="job"))
    else:
        lease = pair.lease()
        pair.attach(lease)
        pair.reader.run()
        pair.poll()
    if ends == "invalid":
        pair.confirm(valid=False)
    if ends == "failing":
        assert pair.reader.one(PullFailed, "job").reason == "disconnected"
        pair.release(lease)
    pair.reader.run()
    assert pair.reader.tokens("job") == answer_of(PROMPT)
    usage = pair.reader.one(Ended, "job").usage
    assert (usage.pulled_tokens, usage.computed_tokens) == (0, len(PROMPT))
    pair.at_rest()


def test_a_lease_that_does_not_fit_is_not_pulled():
    pair = Pair()
    lease = pair.lease()
    other = replace(pair.holder.agent, layout=replace(pair.holder.agent.layout, kv_heads=9))
    beyond = tuple(replace(page, page=page.page + 10_000) for page in lease.pages)
    half = (*lease.pages[:-1], replace(lease.pages[-1], valid_tokens=1))
    wrong = {
        "layout": (lease, other),
        "gap": (pair.lease(skip_blocks=2), None),
        "short": (replace(lease, pages=beyond), None),
        "short ": (replace(lease, pages=half), None),
        "short  ": (replace(lease, pages=()), None),
    }
    for number, (reason, (misfit, source)) in enumerate(wrong.items()):
        ids = [100 + number, *PROMPT]
        pair.ask(f"job{number}", ids)
        pair.attach(misfit, f"job{number}", source)
        assert pair.reader.one(PullFailed, f"job{number}").reason == reason.strip()
        pair.reader.run()
        assert pair.reader.tokens(f"job{number}") == answer_of(ids)
    assert not pair.network.reads


def test_without_room_at_once_there_is_no_load():
    pair = Pair(reader={"pages": 24})
    pair.reader.generate("big", [9] * 5, max_tokens=16 * BLOCK)
    pair.reader.core.step()
    pair.ask()
    pair.attach(pair.lease())
    assert pair.reader.one(PullFailed, "job").reason == "room"
    pair.reader.run()
    assert pair.reader.tokens("job") == answer_of(PROMPT)


@pytest.mark.parametrize("how", ["cancel", "read_locally", "stuck", "deadline"])
def test_pages_that_a_load_may_still_write_are_in_quarantine(how):
    pair = Pair()
    pair.network.held = True
    pair.ask(deadline_at_s=pair.clock.now_s + 60.0)
    lease = pair.lease()
    pair.attach(lease)
    pair.reader.core.step()
    if how == "cancel":
        pair.reader.core.handle(Cancel(job_id="job"))
    elif how == "read_locally":
        pair.reader.core.handle(ReadLocally(job_id="job"))
    else:
        pair.clock.sleep(70.0 if how == "deadline" else 11.0)
    pair.reader.run()
    assert pair.reader.pool.count(PageState.QUARANTINED) == HELD // BLOCK
    if how == "stuck":
        assert pair.reader.one(PullFailed, "job").reason == "timeout"
        assert pair.network.reads[0].abandoned
    if how in {"stuck", "read_locally"}:
        assert pair.reader.tokens("job") == answer_of(PROMPT)
    if how == "deadline":
        assert pair.reader.of(Failed, "job")
    pair.network.held = False
    pair.release(lease)
    pair.at_rest()


def test_what_is_known_to_come_next_stays_so():
    forced = answer_of(PROMPT)[0]
    pair = Pair()
    pair.ask(forced_next=forced)
    pair.bring()
    pair.reader.run()
    assert [forced, *pair.reader.tokens("job")] == answer_of(PROMPT)
    pair.at_rest()


def test_waiting_jobs_count_as_waiting():
    pair = Pair(reader={"queue_jobs": 1})
    pair.ask("one")
    pair.ask("two")
    assert pair.reader.of(Failed, "two")


def test_two_jobs_that_bring_the_same_prefix():
    pair = Pair()
    for job_id in ("one", "two"):
        pair.ask(job_id)
        pair.attach(pair.lease(), job_id)
    pair.poll()
    for job_id in ("one", "two"):
        pair.confirm(job_id)
    pair.reader.run()
    for job_id in ("one", "two"):
        assert pair.reader.tokens(job_id) == answer_of(PROMPT)
    pair.at_rest()


def test_two_jobs_whose_shared_prefix_fails_to_load():
    pair = Pair()
    pair.network.failing = True
    leases = {job_id: pair.lease() for job_id in ("one", "two")}
    for job_id, lease in leases.items():
        pair.ask(job_id)
        pair.attach(lease, job_id)
    pair.poll()
    pair.reader.run()
    for job_id, lease in leases.items():
        assert pair.reader.one(PullFailed, job_id).reason == "disconnected"
        assert pair.reader.tokens(job_id) == answer_of(PROMPT)
        pair.release(lease)
    pair.at_rest()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_becomes_of_loads_answers_are_right_and_nothing_is_left(seed):
    draw = random.Random(seed)
    pair = Pair(reader={"pages": draw.choice((24, 48, 96))})
    leases, prompts, cancelled = [], {}, set()
    for number in range(12):
        job_id = f"job{number}"
        ids = PROMPT[: draw.randrange(BLOCK, len(PROMPT))] + [200 + draw.randrange(3)] * draw.randrange(1, 6)
        prompts[job_id] = ids
        pair.network.failing, pair.network.held = draw.random() < 0.2, draw.random() < 0.2
        pair.network.polls = draw.randrange(4)
        pair.ask(job_id, ids, prefix_tokens=draw.choice((0, HELD, HELD)), max_tokens=draw.randrange(1, 9))
        held = pair.reader.one(Held, job_id)
        lease = pair.lease(ids, skip_blocks=held.tokens // BLOCK) if draw.random() < 0.9 else None
        if lease is not None:
            leases.append(lease)
            pair.attach(lease, job_id)
        for _ in range(draw.randrange(6)):
            pair.reader.core.step()
            pair.reader.core.check_integrity()
        if pair.reader.of(Pulled, job_id) and draw.random() < 0.8:
            pair.confirm(job_id, valid=None if draw.random() < 0.8 else False)
        elif draw.random() < 0.3:
            cancelled.add(job_id)
            pair.reader.core.handle(Cancel(job_id=job_id))
        else:
            pair.reader.core.handle(ReadLocally(job_id=job_id))
        pair.reader.core.check_integrity()
    pair.network.failing = pair.network.held = False
    pair.reader.run()
    pair.poll()
    for job_id, ids in prompts.items():
        if job_id not in cancelled:
            told = pair.reader.tokens(job_id)
            assert told == answer_of(ids)[: len(told)]
            assert pair.reader.of(Ended, job_id)
    for lease in leases:
        pair.release(lease)
    pair.at_rest()
