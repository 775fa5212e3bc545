"""Random schedules over two replicas: every answer that ends is right, and every page comes back."""

import random
from functools import cache

import pytest
from engine_fakes import BLOCK, Fleet, answer_of

from kvrelay.engine.protocol import Cancel, Ended, Failed
from kvrelay.types import Sampling

JOBS = 30
HISTORIES = 12


def random_prompt(rng):
    """Prompts share prefixes often: the first pages come from a small family."""
    family = rng.randrange(3)
    shared = [family * 10 + i % 7 + 1 for i in range(rng.randrange(6 * BLOCK))]
    return [*shared, *(rng.randrange(1, 200) for _ in range(rng.randrange(1, 2 * BLOCK)))]


@cache
def expected(prompt, sampling):
    return answer_of(list(prompt), sampling=sampling)


def disturb(fleet, rng, alive):
    """Change the network, cancel somebody, or let time pass."""
    what = rng.random()
    if what < 0.08:
        fleet.network.held = not fleet.network.held
    elif what < 0.12:
        fleet.network.failing = not fleet.network.failing
    elif what < 0.20:
        for read in fleet.network.reads:
            if not read.closed and rng.random() < 0.5:
                read.land()
    elif what < 0.30 and alive:
        cancel(fleet, rng.choice(alive))
    elif what < 0.33:
        fleet.clock.sleep(3.0)


def cancel(fleet, job_id):
    if job_id in fleet.requests:
        fleet.cancel(job_id)
    else:
        fleet.decode.core.handle(Cancel(job_id=job_id))
        fleet.ended[job_id] = "cancelled"


@pytest.mark.parametrize("history", range(HISTORIES))
def test_a_random_history_ends_with_right_answers_and_empty_pools(history):
    rng = random.Random(history)
    chunk = rng.choice([3, 8, 64])
    fleet = Fleet(
        decode={"pages": 32, "chunk_tokens": chunk, "max_sequences": 4, "pull_timeout_s": 2.0},
        prefill={"pages": 24, "chunk_tokens": rng.choice([4, 16])},
    )
    jobs = {}
    for number in range(JOBS):
        job_id = f"job{number}"
        prompt = random_prompt(rng)
        sampling = Sampling(max_tokens=rng.randrange(1, 20), temperature=rng.choice([0.0, 1.0]), seed=number)
        jobs[job_id] = (tuple(prompt), sampling)
        priority = rng.randrange(-1, 2)
        if rng.random() < 0.6:
            fleet.ask(job_id, prompt, sampling=sampling, priority=priority)
        else:
            fleet.decode.generate(job_id, prompt, sampling=sampling, priority=priority)
        for _ in range(rng.randrange(6)):
            fleet.pump()
            alive = [job for job in jobs if job not in over(fleet)]
            disturb(fleet, rng, alive)
        fleet.decode.core.check_integrity()
        fleet.prefill.core.check_integrity()
    fleet.network.held = fleet.network.failing = False
    fleet.run(until=lambda: set(jobs) <= over(fleet))
    for job_id, (prompt, sampling) in jobs.items():
        if fleet.ended.get(job_id) != "cancelled":
            told = fleet.answers[job_id] if job_id in fleet.requests else fleet.decode.tokens(job_id)
            assert told == expected(prompt, sampling), job_id
    assert not fleet.decode.of(Failed)
    fleet.run(until=lambda: all(read.closed for read in fleet.network.reads))
    fleet.at_rest()


def over(fleet):
    return set(fleet.ended) | {event.job_id for event in fleet.decode.of(Ended)}
