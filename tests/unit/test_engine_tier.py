"""A replica with a disk tier: what it computed once it loads after a restart, whole and right or not at all."""

import contextlib
import logging
import os
import random
import threading
import time

import pytest
from engine_fakes import BLOCK, Clock, Fleet, Network, Replica, answer_of

from kvrelay.engine.pool import PageState
from kvrelay.engine.protocol import BlocksChanged, Cancel, ClearCache, Ended, Failed, Granted, Held, TierLoad, TierWrote
from kvrelay.errors import InvalidArgument
from kvrelay.kv.tiers.disk import SUFFIX
from kvrelay.types import Sampling, split_keys

PROMPT = list(range(1, 6 * BLOCK + 2))
PAGES = len(PROMPT) // BLOCK
SLOW_PREFILL = "prefill_ms_per_token=10"
"""So slow that loading is predicted to be faster, on the clock that the test turns."""
SETTLE_TIMEOUT_S = 20.0


@pytest.fixture
def start(tmp_path):
    """Start replicas on one directory; a second one under a name replaces the first."""
    running = {}

    def starts(name="replica", **options):
        kill(name)
        replica = Replica(name, **{"disk_tier_dir": str(tmp_path), "mock_profile": SLOW_PREFILL} | options)
        running[name] = replica
        return replica

    def kill(name):
        if name in running:
            running.pop(name).core.close()

    yield starts
    for name in list(running):
        kill(name)


def settle(replica):
    """Step until nothing runs and nothing moves between pool and tier."""
    end = time.monotonic() + SETTLE_TIMEOUT_S
    tiering = replica.core._tiering
    while replica.core.step() or (tiering is not None and tiering.busy):
        assert time.monotonic() < end, "the tier does not come to rest"
    replica.core.step()
    replica.core.check_integrity()
    return replica


def ask(replica, job_id, ids=PROMPT, **options):
    replica.generate(job_id, ids, **options)
    settle(replica)
    return replica.one(Ended, job_id).usage


def files(tmp_path):
    return sorted(tmp_path.rglob(f"*{SUFFIX}"))


def file_of(tmp_path, replica, page):
    """The file of a page of PROMPT."""
    name = split_keys(replica.prompt(PROMPT).block_keys)[page]
    return next(tmp_path.rglob(name.hex() + SUFFIX))


def published(replica):
    keys = set()
    for event in replica.of(BlocksChanged):
        keys = (keys - set(event.removed)) | set(event.added)
    return keys


def test_a_restarted_replica_loads_what_it_computed_before(start):
    before = ask(start(), "a")
    assert (before.cached_tokens, before.computed_tokens) == (0, len(PROMPT))
    replica = start()
    after = ask(replica, "a")
    assert (after.cached_tokens, after.computed_tokens) == (PAGES * BLOCK, 1)
    assert replica.tokens("a") == answer_of(PROMPT)
    load = replica.one(TierLoad)
    assert (load.choice, load.tokens) == ("loaded", PAGES * BLOCK)
    replica.at_rest()


def test_a_restarted_replica_publishes_what_lies_on_its_disk(start):
    replica = start()
    ask(replica, "a")
    held = published(replica)
    assert set(split_keys(replica.prompt(PROMPT).block_keys)) <= held
    again = start()
    again.run()
    assert published(again) == held


def test_pages_are_written_while_there_is_room_and_then_only_when_they_were_hit(start, tmp_path):
    page_bytes = BLOCK * 64 + 4096
    replica = start(disk_tier_mib=1, pages=1024)
    room = (1 << 20) // page_bytes
    unique = [[first + 1, *range(1, 5 * BLOCK)] for first in range(room // 5 + 5)]
    for number, ids in enumerate(unique):
        ask(replica, f"job{number}", ids, max_tokens=1)
    full = {path.name for path in files(tmp_path)}
    assert len(full) == room
    last = unique[-1]
    name = split_keys(replica.prompt(last).block_keys)[0].hex() + SUFFIX
    assert name not in full
    ask(replica, "again", last, max_tokens=1)
    assert name in {path.name for path in files(tmp_path)}
    assert len(files(tmp_path)) == room


def test_a_block_stays_published_until_every_tier_has_dropped_it(start, tmp_path):
    replica = start(pages=PAGES + 3)
    ask(replica, "a", max_tokens=1)
    keys = set(split_keys(replica.prompt(PROMPT).block_keys))
    other = [499 - i for i in range(len(PROMPT))]
    ask(replica, "b", other, max_tokens=1)
    assert replica.core._parts.cache.page_of(split_keys(replica.prompt(PROMPT).block_keys)[-1]) is None
    assert keys <= published(replica)
    file_of(tmp_path, replica, 2).unlink()
    ask(replica, "c", max_tokens=1)
    assert replica.one(TierLoad).choice == "failed"
    assert replica.one(Ended, "c").usage.cached_tokens == 2 * BLOCK
    assert keys <= published(replica), "computed and written anew"
    replica.core.handle(ClearCache())
    settle(replica)
    assert published(replica) == set()
    assert files(tmp_path) == []


@pytest.mark.parametrize("page", [0, 3, PAGES - 1])
def test_a_flipped_byte_is_a_miss_a_log_line_and_the_right_answer(start, tmp_path, page, caplog):
    replica = start()
    ask(replica, "a")
    path = file_of(tmp_path, replica, page)
    data = bytearray(path.read_bytes())
    data[-30] ^= 0x10
    path.write_bytes(data)
    replica = start()
    with caplog.at_level(logging.WARNING):
        usage = ask(replica, "a")
    assert replica.tokens("a") == answer_of(PROMPT)
    assert (usage.cached_tokens, usage.computed_tokens) == (page * BLOCK, len(PROMPT) - page * BLOCK)
    assert "tier_page_bad" in caplog.messages
    settle(replica)
    assert ask(start(), "a").cached_tokens == PAGES * BLOCK, "the page was written anew"


def test_what_the_device_holds_is_not_loaded_and_what_follows_is(start):
    replica = start(pages=PAGES + 2)
    ask(replica, "a", max_tokens=1)
    other = [499 - i for i in range(3 * BLOCK + 1)]
    ask(replica, "b", other, max_tokens=1)
    on_device = len(replica.core._parts.cache.match(split_keys(replica.prompt(PROMPT).block_keys), max_pages=PAGES))
    assert 0 < on_device < PAGES
    usage = ask(replica, "c", max_tokens=1)
    assert usage.cached_tokens == PAGES * BLOCK
    assert replica.one(TierLoad).tokens == (PAGES - on_device) * BLOCK
    assert replica.tokens("c") == answer_of(PROMPT, max_tokens=1)


def test_loading_is_left_out_when_computing_is_predicted_to_be_faster(start):
    ask(start(mock_profile=""), "a")
    replica = start(mock_profile="")
    usage = ask(replica, "a")
    assert usage.cached_tokens == PAGES * BLOCK, "nothing is known of this engine: a load is tried"
    for number in range(30):  # an engine that computes in no time at all
        ask(replica, f"warm{number}", [number + 300] * 3 * BLOCK, max_tokens=1)
    replica.core.handle(ClearCache())
    settle(replica)
    ask(replica, "b")
    replica.core._parts.cache.clear()
    usage = ask(replica, "c")
    assert replica.of(TierLoad)[-1].choice == "computed"
    assert usage.computed_tokens == len(PROMPT)


def test_two_jobs_with_one_prefix_share_a_load(start):
    ask(start(), "a")
    replica = start()
    replica.generate("b", PROMPT)
    replica.generate("c", PROMPT)
    settle(replica)
    assert len(replica.of(TierLoad)) == 1
    for job_id in ("b", "c"):
        assert replica.one(Ended, job_id).usage.cached_tokens == PAGES * BLOCK
        assert replica.tokens(job_id) == answer_of(PROMPT)
    replica.at_rest()


def test_a_job_that_is_cancelled_while_its_prefix_loads_leaves_nothing_behind(start):
    ask(start(), "a")
    replica = start()
    replica.generate("b", PROMPT)
    replica.core.step()
    assert replica.core._tiering.busy
    replica.core.handle(Cancel(job_id="b"))
    replica.core.check_integrity()
    settle(replica)
    assert not replica.of(Ended, "b")
    replica.at_rest()


def test_a_prefill_replica_leases_pages_that_it_loaded(start):
    ask(start(), "a")
    replica = start()
    replica.prefill("b", PROMPT)
    settle(replica)
    assert replica.one(Granted, "b").cached_tokens == PAGES * BLOCK


def test_a_decode_replica_asks_prefill_only_for_what_its_disk_lacks(tmp_path):
    fleet = Fleet(decode={"disk_tier_dir": str(tmp_path), "mock_profile": SLOW_PREFILL})
    fleet.decode.generate("a", PROMPT)
    settle(fleet.decode)
    fleet.decode.core.close()
    again = Fleet(decode={"disk_tier_dir": str(tmp_path), "mock_profile": SLOW_PREFILL})
    again.ask("b", [*PROMPT, 5, 6, 7, 8, 9])
    settle(again.decode)  # the tier's thread takes real time, which the fleet's clock does not know of
    again.run()
    assert again.decode.one(Held, "b").tokens == PAGES * BLOCK
    assert again.answers["b"] == answer_of([*PROMPT, 5, 6, 7, 8, 9])
    assert again.ended["b"].usage.cached_tokens == PAGES * BLOCK
    settle(again.decode)
    again.at_rest()
    again.decode.core.close()


class StuckTier:
    """Stands before a tier: gets wait until they are let go."""

    def __init__(self, tier, gate):
        self._tier, self._gate = tier, gate

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def get(self, page, into):
        assert self._gate.wait(SETTLE_TIMEOUT_S)
        return self._tier.get(page, into)


def test_a_disk_that_hangs_delays_a_job_by_its_patience_and_no_more(start):
    ask(start(), "a")
    replica = start()
    gate = threading.Event()
    worker = replica.core._tiering._worker
    worker.tier = StuckTier(worker.tier, gate)
    replica.generate("b", PROMPT)
    replica.core.step()
    assert not replica.core.step()
    replica.clock.sleep(60.0)
    replica.run()
    assert replica.one(Ended, "b").usage.cached_tokens == 0
    assert replica.tokens("b") == answer_of(PROMPT)
    assert replica.pool.count(PageState.ACTIVE) > 0, "pages under the read are not reused"
    replica.generate("c", [*PROMPT, 3])
    replica.run()
    assert replica.tokens("c") == answer_of([*PROMPT, 3])
    gate.set()
    settle(replica)
    replica.at_rest()


def test_a_disk_that_is_full_turns_the_tier_off_and_nothing_else(start, monkeypatch, caplog):
    replica = start()
    ask(replica, "a", max_tokens=1)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with caplog.at_level(logging.ERROR):
        ask(replica, "b", [9] * len(PROMPT), max_tokens=1)
    assert "tier_off" in caplog.messages
    assert replica.tokens("b") == answer_of([9] * len(PROMPT), max_tokens=1)
    replica.core._parts.cache.clear()
    replica.core.step()
    assert published(replica) == set()
    assert ask(replica, "c", max_tokens=1).computed_tokens == len(PROMPT)
    replica.at_rest()


def test_a_directory_that_cannot_be_used_is_logged_and_done_without(start, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.ERROR):
        replica = start(disk_tier_dir=str(tmp_path / "file"))
    assert caplog.messages == ["tier_off"]
    ask(replica, "a")
    assert replica.tokens("a") == answer_of(PROMPT)


def test_a_tier_that_holds_no_page_is_refused(start):
    with pytest.raises(InvalidArgument, match="disk_tier_mib"):
        start(disk_tier_mib=0)


def test_writes_are_told_in_sums(start):
    replica = start()
    ask(replica, "a", max_tokens=1)
    assert sum(event.bytes for event in replica.of(TierWrote)) == PAGES * BLOCK * 64


@pytest.mark.parametrize("history", range(6))
def test_a_random_history_with_a_small_pool_and_a_small_disk_ends_right(tmp_path, history):
    rng = random.Random(history)
    clock, network = Clock(), Network()
    families = [[100 * family + i % 7 + 1 for i in range(6 * BLOCK)] for family in range(3)]
    loaded = 0
    for life in range(3):
        replica = Replica(
            network=network,
            clock=clock,
            pages=24,
            disk_tier_dir=str(tmp_path),
            mock_profile=SLOW_PREFILL,
            chunk_tokens=rng.choice([3, 8, 64]),
        )
        jobs = {}
        for number in range(20):
            prompt = [
                *rng.choice(families)[: rng.randrange(6 * BLOCK)],
                *rng.choices(range(1, 200), k=rng.randrange(1, 9)),
            ]
            sampling = Sampling(max_tokens=rng.randrange(1, 10), temperature=rng.choice([0.0, 1.0]), seed=number)
            job_id = f"{life}-{number}"
            if rng.random() < 0.7:
                jobs[job_id] = (prompt, sampling)
                replica.generate(job_id, prompt, sampling=sampling)
            else:
                replica.prefill(job_id, prompt, sampling=sampling, lease_ttl_s=1.0)
            for _ in range(rng.randrange(8)):
                replica.core.step()
                replica.core.check_integrity()
            if rng.random() < 0.2:
                replica.core.handle(Cancel(job_id=job_id))
                jobs.pop(job_id, None)
            if rng.random() < 0.1 and (there := files(tmp_path)):
                path = rng.choice(there)
                with contextlib.suppress(FileNotFoundError):  # its tier has just given it up
                    path.write_bytes(path.read_bytes()[: rng.randrange(6000)])
        clock.sleep(2.0)
        settle(replica)
        for job_id, (prompt, sampling) in jobs.items():
            assert replica.tokens(job_id) == answer_of(prompt, sampling=sampling), job_id
        assert not [event for event in replica.of(Failed) if event.job_id in jobs]
        loaded += sum(event.tokens for event in replica.of(TierLoad))
        while len(replica.core._parts.stock) or replica.core._parts.jobs:
            clock.sleep(2.0)
            settle(replica)
        replica.at_rest()
        replica.core.close()
    assert loaded
