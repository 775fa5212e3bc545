"""Random schedules over simulated replicas: each answer that ends is right, nothing is stuck, every page comes back.

`make chaos-kv` runs many more of them.
"""

import dataclasses
from functools import cache

import pytest

from kvrelay.engine.pulls import Puller
from kvrelay.kv.leases import LeaseTable
from ops.chaos import schedule

SCHEDULES = 100
BUNDLE = 10
"""Schedules a test: one alone takes a fraction of a second."""


run_once = cache(schedule.run)


@pytest.fixture(autouse=True)
def calm_log(caplog):
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize("first", range(0, SCHEDULES, BUNDLE))
def test_random_schedules_end_right_and_give_everything_back(first):
    for seed in range(first, first + BUNDLE):
        try:
            run_once(seed)
        except AssertionError as error:
            pytest.fail(f"again: python -m ops.chaos.kv --schedules 1 --rounds 0 --seed {seed}: {error}")


def test_a_seed_replays_its_schedule():
    assert schedule.run(3) == run_once(3)


def test_the_schedules_meet_what_they_are_for():
    """A slice of them sees every kind of end, of a pull that is not to be used, and of blow."""
    outcomes = [run_once(seed) for seed in range(40)]
    ended = set().union(*(outcome.ended for outcome in outcomes))
    legs = set().union(*(outcome.legs for outcome in outcomes))
    seen = set().union(*(outcome.seen for outcome in outcomes))
    assert ended >= {"answered", "cancelled", "DeadlineExceeded", "Unavailable"}
    assert legs >= {"pulled", "timeout", "injected", "declined", "expired", "PeerLost"}
    assert seen >= {"killed", "stopped", "reset", "abandoned", "prefix_leased"}


def without_quarantine(monkeypatch):
    def give_up(_, pull, **_stuck):
        pull.pending.clear()
        return frozenset()

    monkeypatch.setattr(Puller, "give_up", give_up)


def without_verdicts(monkeypatch):
    judge = LeaseTable.confirm
    monkeypatch.setattr(LeaseTable, "confirm", lambda *given: dataclasses.replace(judge(*given), valid=True))


def without_expiry(monkeypatch):
    monkeypatch.setattr(LeaseTable, "expire", lambda _: [])


@pytest.mark.parametrize("broken", [without_quarantine, without_verdicts, without_expiry])
def test_the_schedules_notice_a_missing_safeguard(broken, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        list(map(schedule.run, range(SCHEDULES)))
