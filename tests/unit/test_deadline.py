"""A deadline is a point in time that can be asked for the time left."""

import math

import pytest

from kvrelay.errors import DeadlineExceeded
from kvrelay.rpc.deadline import Deadline


class Caller:
    def __init__(self, left_s):
        self.left_s = left_s

    def time_remaining(self):
        return self.left_s


def test_time_left_counts_down_to_zero_and_not_below():
    deadline = Deadline.after(60)
    assert 59 < deadline.left_s() <= 60
    assert not deadline.expired
    past = Deadline.after(-1)
    assert past.left_s() == 0
    assert past.expired


def test_the_callers_deadline_counts():
    assert 4 < Deadline.of(Caller(5.0), default_s=600).left_s() <= 5


@pytest.mark.parametrize("left_s", [None, math.inf])
def test_without_one_the_default_counts(left_s):
    assert 599 < Deadline.of(Caller(left_s), default_s=600).left_s() <= 600


def test_the_sooner_of_two():
    deadline = Deadline.after(10)
    assert deadline.sooner(60) == deadline
    assert deadline.sooner(1).left_s() <= 1


def test_checking_raises_once_the_time_is_over():
    Deadline.after(60).check("anything")
    with pytest.raises(DeadlineExceeded, match="waiting for room"):
        Deadline.after(0).check("waiting for room")
