"""Random schedules over two replicas with disk tiers that live on: answers are right and every page comes back."""

import contextlib
import random
import time
from functools import cache

import pytest
from engine_fakes import BLOCK, Fleet, answer_of

from kvrelay.engine.protocol import Cancel, Ended, Failed, TierLoad
from kvrelay.kv.tiers.disk import SUFFIX
from kvrelay.types import Sampling

LIVES = 3
JOBS = 14
HISTORIES = 6
REST_TIMEOUT_S = 20.0


def random_prompt(rng):
    """Prompts share prefixes often: the first pages come from a small family."""
    family = rng.randrange(3)
    shared = [family * 10 + i % 7 + 1 for i in range(rng.randrange(6 * BLOCK))]
    return [*shared, *(rng.randrange(1, 200) for _ in range(rng.randrange(1, 2 * BLOCK)))]


@cache
def expected(prompt, sampling):
    return answer_of(list(prompt), sampling=sampling)


def over(fleet):
    return set(fleet.ended) | {event.job_id for event in fleet.decode.of(Ended)}


def disturb(fleet, rng):
    """Change the network, or let time pass."""
    what = rng.random()
    if what < 0.08:
        fleet.network.held = not fleet.network.held
    elif what < 0.12:
        fleet.network.failing = not fleet.network.failing
    elif what < 0.15:
        fleet.clock.sleep(3.0)


def cancel(fleet, job_id):
    if job_id in fleet.requests:
        fleet.cancel(job_id)
    else:
        fleet.decode.core.handle(Cancel(job_id=job_id))
        fleet.ended[job_id] = "cancelled"


def damage(rng, folder):
    """Cut a file short, or flip a bit of it."""
    there = sorted(folder.rglob(f"*{SUFFIX}"))
    if not there or rng.random() < 0.9:
        return
    with contextlib.suppress(FileNotFoundError), rng.choice(there).open("r+b") as file:
        data = bytearray(file.read())
        if not data:
            return
        at = rng.randrange(len(data))
        file.seek(at)
        file.write(bytes([data[at] ^ 1 << rng.randrange(8)]))
        file.truncate(rng.choice([len(data), at]))


def rest(fleet):
    """Wait until the tiers' threads have done what they were asked, then check that nothing is held."""
    fleet.clock.sleep(60.0)  # leases that nobody confirmed
    fleet.pump()
    end = time.monotonic() + REST_TIMEOUT_S
    while any(replica.core._tiering.busy for replica in (fleet.decode, fleet.prefill)):
        assert time.monotonic() < end
        fleet.pump()
    fleet.at_rest()


@pytest.mark.parametrize("history", range(HISTORIES))
def test_a_random_history_over_restarts_ends_with_right_answers_and_empty_pools(tmp_path, history):
    rng = random.Random(history)
    loaded = 0
    for life in range(LIVES):
        options = {"disk_tier_dir": str(tmp_path), "mock_profile": "prefill_ms_per_token=1"}
        fleet = Fleet(
            decode={"pages": 32, "chunk_tokens": 8, "max_sequences": 4, "pull_timeout_s": 2.0} | options,
            prefill={"pages": 24, "chunk_tokens": rng.choice([4, 16])} | options,
        )
        jobs = {}
        for number in range(JOBS):
            job_id, prompt = f"{life}-{number}", random_prompt(rng)
            sampling = Sampling(max_tokens=rng.randrange(1, 3 * BLOCK), temperature=rng.choice([0.0, 1.0]), seed=number)
            jobs[job_id] = (tuple(prompt), sampling)
            if rng.random() < 0.6:
                fleet.ask(job_id, prompt, sampling=sampling)
            else:
                fleet.decode.generate(job_id, prompt, sampling=sampling)
            for _ in range(rng.randrange(6)):
                fleet.pump()
                disturb(fleet, rng)
                damage(rng, tmp_path)
            if rng.random() < 0.2 and job_id not in over(fleet):
                cancel(fleet, job_id)
            fleet.decode.core.check_integrity()
            fleet.prefill.core.check_integrity()
        fleet.network.held = fleet.network.failing = False
        fleet.run(until=lambda fleet=fleet, jobs=jobs: set(jobs) <= over(fleet))
        for job_id, (prompt, sampling) in jobs.items():
            if fleet.ended.get(job_id) != "cancelled":
                told = fleet.answers[job_id] if job_id in fleet.requests else fleet.decode.tokens(job_id)
                assert told == expected(prompt, sampling), job_id
        assert not fleet.decode.of(Failed)
        fleet.run(until=lambda fleet=fleet: all(read.closed for read in fleet.network.reads))
        rest(fleet)
        for replica in (fleet.decode, fleet.prefill):
            loaded += sum(event.tokens for event in replica.of(TierLoad) if event.choice == "loaded")
            replica.core.close()
    assert loaded
