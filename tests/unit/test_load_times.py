"""Predicted times: of loads by source, of prompts by context; from a prior, then from what was measured."""

import random

import pytest

from kvrelay.engine.speed import PRIOR_STEP_S, PRIOR_TOKEN_CONTEXT_S, PRIOR_TOKEN_S, Speed, attended_by
from kvrelay.kv.fit import Fit
from kvrelay.kv.load_times import HALF_LIFE_S, PRIOR_BYTES_PER_S, PRIOR_CALLS_S, SOURCES_MAX, LoadTimes

CHUNK = 256
NEAR, FAR = ("near", "device"), ("far", "device")


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def sampled(fit, features, truth, *, noise=0.0, seed=1):
    draw = random.Random(seed)
    for x in features:
        fit.add(x, sum(c * value for c, value in zip(truth, x, strict=True)) * (1 + draw.uniform(-noise, noise)))


# ---------------------------------------------------------------- the fit


def test_before_anything_was_measured_the_prior_holds():
    fit = Fit(prior=(0.5, 2.0), usual=(1.0, 10.0))
    assert fit.predict((1.0, 7.0)) == pytest.approx(14.5)


def test_samples_take_over_from_the_prior_within_a_few():
    fit = Fit(prior=(0.01, 1e-9), usual=(1.0, 16e6))
    sampled(fit, [(1.0, size) for size in (1e6, 4e6, 64e6, 2e6)], (0.002, 1e-8))
    for size in (5e5, 8e6, 1e8):
        assert fit.predict((1.0, size)) == pytest.approx(0.002 + size * 1e-8, rel=0.1)


def test_a_few_samples_of_one_size_set_the_scale():
    fit = Fit(prior=(0.01, 1e-9), usual=(1.0, 16e6))
    sampled(fit, [(1.0, 32e6)] * 6, (0.0, 1e-7))
    assert fit.predict((1.0, 32e6)) == pytest.approx(3.2, rel=0.3)
    assert fit.predict((1.0, 64e6)) > 4.0


def test_one_stall_does_not_spoil_the_prediction():
    fit = Fit(prior=(0.01, 1e-9), usual=(1.0, 16e6))
    sampled(fit, [(1.0, 16e6)] * 20, (0.01, 1e-9))
    fit.add((1.0, 16e6), 60.0)
    assert fit.predict((1.0, 16e6)) < 0.035


def test_noise_averages_out_and_no_coefficient_is_negative():
    fit = Fit(prior=(0.01, 1e-9), usual=(1.0, 16e6))
    draw = random.Random(7)
    sizes = [10 ** draw.uniform(5, 8) for _ in range(200)]
    sampled(fit, [(1.0, size) for size in sizes], (0.005, 2e-9), noise=0.3)
    for size in (1e6, 1e7, 1e8):
        assert fit.predict((1.0, size)) == pytest.approx(0.005 + size * 2e-9, rel=0.2)
    falling = Fit(prior=(0.01, 1e-9), usual=(1.0, 16e6))
    sampled(falling, [(1.0, 1e6)] * 10, (0.1, 0.0))
    falling.add((1.0, 1e8), 0.001)
    assert falling.predict((0.0, 1e8)) >= 0
    assert falling.predict((1.0, 0.0)) >= 0


def test_it_follows_a_change():
    fit = Fit(prior=(0.01, 1e-9), usual=(1.0, 16e6))
    sampled(fit, [(1.0, 16e6)] * 50, (0.0, 1e-9))
    sampled(fit, [(1.0, 16e6)] * 40, (0.0, 1e-8))
    assert fit.predict((1.0, 16e6)) > 0.1


# ---------------------------------------------------------------- prompts


def test_a_prompt_takes_longer_after_a_long_context():
    speed = Speed()
    prior_s = PRIOR_STEP_S + CHUNK * PRIOR_TOKEN_S + attended_by(0, CHUNK) * PRIOR_TOKEN_CONTEXT_S
    assert speed.compute_s(0, CHUNK, chunk_tokens=CHUNK) == pytest.approx(prior_s)
    for start in range(0, 8192, CHUNK):
        attended = attended_by(start, start + CHUNK)
        speed.add(prompt_tokens=CHUNK, attended=attended, elapsed_s=0.004 + CHUNK * 1e-4 + attended * 1e-7)
    near, far = (speed.compute_s(at, at + 512, chunk_tokens=CHUNK) for at in (0, 7000))
    assert near == pytest.approx(0.008 + 0.0512 + attended_by(0, 512) * 1e-7, rel=0.1)
    assert far == pytest.approx(0.008 + 0.0512 + attended_by(7000, 7512) * 1e-7, rel=0.1)
    assert speed.compute_s(5, 5, chunk_tokens=CHUNK) == 0.0


def test_short_last_chunks_do_not_make_long_prompts_look_slow():
    speed = Speed()
    for tokens in (CHUNK, 3, 1, CHUNK, 2, 7, 1, 1, CHUNK, 1, 1, 2):
        speed.add(prompt_tokens=tokens, attended=attended_by(0, tokens), elapsed_s=0.01 + tokens * 1e-4)
    assert speed.compute_s(0, 2560, chunk_tokens=CHUNK) == pytest.approx(10 * 0.01 + 0.256, rel=0.2)


# ---------------------------------------------------------------- loads


def test_sources_are_measured_apart_and_start_from_the_prior():
    times = LoadTimes(clock=Clock())
    assert times.predict(NEAR, 10**8) == pytest.approx(PRIOR_CALLS_S + 1e8 / PRIOR_BYTES_PER_S)
    for size in (10**6, 10**7, 10**8) * 5:
        times.learn(FAR, size, 0.050 + size / 5e7)
    assert times.predict(FAR, 10**8) == pytest.approx(2.05, rel=0.1)
    assert times.predict(("far", "disk"), 10**8) == times.predict(NEAR, 10**8)
    assert times.predict(NEAR, 10**8) == pytest.approx(PRIOR_CALLS_S + 1e8 / PRIOR_BYTES_PER_S)


def test_a_source_that_was_slow_once_is_tried_again_in_the_end():
    clock = Clock()
    times = LoadTimes(clock=clock)
    before_s = times.predict(NEAR, 10**6)
    times.learn(NEAR, 10**6, 10.0)
    assert times.predict(NEAR, 10**6) > 3 * before_s
    clock.now_s += 20 * HALF_LIFE_S
    assert times.predict(NEAR, 10**6) < 1.1 * before_s


def test_sources_are_bounded():
    times = LoadTimes(clock=Clock())
    times.learn(NEAR, 10**6, 1.0)
    learned_s = times.predict(NEAR, 10**6)
    for number in range(SOURCES_MAX):
        times.learn((str(number), "device"), 10**6, 1.0)
    assert times.predict(NEAR, 10**6) < learned_s / 2
