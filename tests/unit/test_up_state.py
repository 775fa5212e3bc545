import os
import signal
import subprocess
import sys

import pytest

from kvrelay.errors import FailedPrecondition, NotFound
from kvrelay.up.processes import is_running, send_signal, start_ticks
from kvrelay.up.state import ChildRecord, FleetRecord, StateFile

END_TIMEOUT_S = 20.0


@pytest.fixture
def record():
    child = ChildRecord(name="prefill-0", kind="prefill", address="127.0.0.1:1", pid=7, start_ticks=8, restarts=1)
    return FleetRecord(
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()),
        router="127.0.0.1:2",
        registry="127.0.0.1:3",
        redis_url="unix:///x",
        children=(child,),
    )


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate(timeout=END_TIMEOUT_S)


def test_a_written_fleet_is_read_back(tmp_path, record):
    state = StateFile(tmp_path / "state")
    state.write(record)
    assert state.read() == record


def test_a_running_fleet_keeps_its_directory(tmp_path, record):
    state = StateFile(tmp_path)
    state.write(record)
    with pytest.raises(FailedPrecondition, match="already"):
        state.claim()


def test_no_fleet_and_a_leftover_are_told_apart_and_both_leave_the_directory_free(tmp_path, record):
    state = StateFile(tmp_path)
    with pytest.raises(NotFound, match="missing"):
        state.read()
    state.claim()
    state.write(FleetRecord(**{**as_fields(record), "start_ticks": record.start_ticks + 1}))
    with pytest.raises(NotFound, match="leftover"):
        state.read()
    state.claim()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"children": 3}', '{"children": [{"pid": 1}]}', "nonsense"])
def test_a_file_of_another_program_is_neither_read_nor_replaced(tmp_path, text):
    state = StateFile(tmp_path)
    state.path.write_text(text)
    with pytest.raises(FailedPrecondition, match="delete it"):
        state.claim()


def test_removing_the_file_twice_is_no_error(tmp_path, record):
    state = StateFile(tmp_path)
    state.write(record)
    state.remove()
    state.remove()


def test_a_process_is_named_by_pid_and_start_time(sleeper):
    ticks = start_ticks(sleeper.pid)
    assert is_running(sleeper.pid, ticks)
    assert not is_running(sleeper.pid, ticks + 1)


def test_a_signal_reaches_the_process_that_was_meant(sleeper):
    send_signal(sleeper.pid, start_ticks(sleeper.pid), signal.SIGTERM)
    assert sleeper.wait(END_TIMEOUT_S) == -signal.SIGTERM


def test_a_process_that_got_the_id_of_an_earlier_one_is_left_alone(sleeper):
    with pytest.raises(NotFound):
        send_signal(sleeper.pid, start_ticks(sleeper.pid) - 1, signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_process_that_has_ended_is_not_found(sleeper):
    ticks = start_ticks(sleeper.pid)
    sleeper.kill()
    sleeper.wait(END_TIMEOUT_S)
    with pytest.raises(NotFound):
        send_signal(sleeper.pid, ticks, signal.SIGKILL)


def as_fields(record):
    return {name: getattr(record, name) for name in record.__slots__}
