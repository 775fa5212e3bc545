import itertools

import pytest

from kvrelay.up.policy import CRASH_WINDOW_S, CRASHES_MAX, Action, RestartPolicy


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_a_first_death_is_followed_by_a_restart(clock):
    assert RestartPolicy("restart", clock).died("prefill-0") is Action.RESTART


def test_three_deaths_within_the_window_are_a_crash_loop(clock):
    policy = RestartPolicy("restart", clock)
    actions = []
    for _ in range(CRASHES_MAX):
        actions.append(policy.died("prefill-0"))
        clock.now_s += CRASH_WINDOW_S / CRASHES_MAX
    assert actions == [Action.RESTART, Action.RESTART, Action.GIVE_UP]


def test_deaths_on_the_window_s_edge_still_count(clock):
    policy = RestartPolicy("restart", clock)
    policy.died("decode-0")
    clock.now_s += CRASH_WINDOW_S
    policy.died("decode-0")
    assert policy.died("decode-0") is Action.GIVE_UP


def test_deaths_that_are_far_apart_never_end_the_fleet(clock):
    policy = RestartPolicy("restart", clock)
    for _ in range(50):
        assert policy.died("prefill-0") is Action.RESTART
        clock.now_s += CRASH_WINDOW_S / 2 + 0.1


def test_each_child_is_counted_by_itself(clock):
    policy = RestartPolicy("restart", clock)
    names = itertools.chain.from_iterable([["prefill-0", "decode-0", "router"]] * (CRASHES_MAX - 1))
    assert {policy.died(name) for name in names} == {Action.RESTART}


def test_on_exit_fail_ends_the_fleet_at_the_first_death(clock):
    assert RestartPolicy("fail", clock).died("registry") is Action.END
