"""A slice of `make chaos-kv` with real processes: replicas are killed and stopped while requests run."""

import pytest

from ops.chaos import rounds

ROUNDS = 6


@pytest.mark.slow
def test_answers_are_right_and_everything_is_given_back_while_replicas_are_killed_and_stopped(capsys):
    failed = rounds.run(seed=1, count=ROUNDS)
    assert failed == 0, capsys.readouterr().out
