"""Supervision of real processes that stand in for the fleet's: restarts, crash loops, draining, no orphans."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import fake_children
from support.fake_children import DRAIN_TIMEOUT_S, START_TIMEOUT_S, Lines, fake_child, has_started, journal
from support.rpc import until

from kvrelay.cli.main import main as kvrelay
from kvrelay.errors import Unavailable
from kvrelay.up.fleet import Fleet
from kvrelay.up.policy import CRASHES_MAX, RestartPolicy
from kvrelay.up.processes import is_running
from kvrelay.up.state import StateFile

WAIT_S = 30.0
NAMES = ["store", "registry", "router", "prefill-0", "decode-0"]


class Supervised:
    """A fleet in this process, and what it told."""

    def __init__(self, folder, behaviours, *, on_exit="restart", drain_timeout_s=DRAIN_TIMEOUT_S):
        self.screen = Lines()
        self.records = ()
        self.fleet = Fleet(
            [fake_child(folder, name, behaviour) for name, behaviour in behaviours.items()],
            policy=RestartPolicy(on_exit, time.monotonic),
            probe=has_started(folder),
            screen=self.screen,
            drain_timeout_s=drain_timeout_s,
            on_change=self._changed,
        )

    def _changed(self, records):
        self.records = records

    def record(self, name):
        return next(record for record in self.records if record.name == name)


@contextlib.asynccontextmanager
async def supervised(folder, behaviours, **options):
    made = Supervised(folder, behaviours, **options)
    try:
        yield made
    finally:
        made.fleet.kill()
        await made.fleet.drain()


async def test_children_start_in_order_and_drain_in_the_order_that_loses_no_request(tmp_path):
    async with supervised(tmp_path, dict.fromkeys(NAMES, "live")) as made:
        await made.fleet.start(START_TIMEOUT_S)
        assert await made.fleet.drain() == ()
    events = journal(tmp_path)
    assert events[:2] == ["started store", "started registry"]
    assert sorted(events[2:5]) == ["started decode-0", "started prefill-0", "started router"]
    assert events[5:] == [f"drained {name}" for name in ("router", "decode-0", "prefill-0", "registry", "store")]


async def test_a_killed_child_is_started_again_under_its_name(tmp_path):
    async with supervised(tmp_path, {"prefill-0": "live", "decode-0": "live"}) as made:
        await made.fleet.start(START_TIMEOUT_S)
        before = made.record("prefill-0")
        os.kill(before.pid, signal.SIGKILL)
        await until(lambda: "prefill-0 is back" in made.screen.said, "the child comes back")
        after = made.record("prefill-0")
        assert (after.address, after.restarts) == (before.address, 1)
        assert after.pid != before.pid
        assert any("SIGKILL" in line for line in made.screen.said)
        assert made.record("decode-0").restarts == 0


async def test_a_child_that_dies_while_the_fleet_starts_is_started_again(tmp_path):
    async with supervised(tmp_path, {"registry": "live", "router": "die-once"}) as made:
        await made.fleet.start(START_TIMEOUT_S)
        await until(lambda: journal(tmp_path).count("started router") == 2, "the router starts twice")


async def test_a_crash_loop_ends_the_start_with_the_child_s_last_words(tmp_path):
    async with supervised(tmp_path, {"registry": "live", "router": "crash"}) as made:
        with pytest.raises(Unavailable) as caught:
            await made.fleet.start(START_TIMEOUT_S)
        assert "router ended" in caught.value.message
        assert "exit code 7" in caught.value.message
        assert "cannot bind the port" in caught.value.message
        assert len([line for name, line in made.screen.logged if name == "router"]) == CRASHES_MAX


async def test_a_crash_loop_ends_what_the_fleet_is_doing(tmp_path):
    async with supervised(tmp_path, {"prefill-0": "live"}) as made:
        await made.fleet.start(START_TIMEOUT_S)

        async def kill_again_and_again():
            for deaths in range(1, CRASHES_MAX + 1):
                os.kill(made.record("prefill-0").pid, signal.SIGKILL)
                await until(lambda wanted=deaths: made.record("prefill-0").restarts == wanted, "a restart")

        with pytest.raises(Unavailable, match="3 times in 60 s"):
            await made.fleet.unless_failed(kill_again_and_again())


async def test_on_exit_fail_ends_the_fleet_at_the_first_death(tmp_path):
    async with supervised(tmp_path, {"prefill-0": "live"}, on_exit="fail") as made:
        await made.fleet.start(START_TIMEOUT_S)
        os.kill(made.record("prefill-0").pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="prefill-0 ended"):
            await made.fleet.unless_failed(until(lambda: False, "nothing"))
        assert journal(tmp_path).count("started prefill-0") == 1


async def test_a_child_that_never_gets_ready_is_named(tmp_path):
    made = Supervised(tmp_path, {"router": "live"})

    async def never(_spec):
        return False

    made.fleet._probe = never
    try:
        with pytest.raises(Unavailable, match="router was not ready in time"):
            await made.fleet.start(0.3)
    finally:
        assert await made.fleet.drain() in ((), ("router (signal SIGTERM)",))


async def test_a_child_that_drain_meets_while_it_starts_has_ended_well(tmp_path):
    async with supervised(tmp_path, {"prefill-0": "deaf"}) as made:
        await made.fleet.start(START_TIMEOUT_S)
        assert await made.fleet.drain() == ()


async def test_a_child_that_will_not_drain_is_killed_and_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr("kvrelay.up.fleet.DRAIN_MARGIN_S", 0.1)
    async with supervised(tmp_path, {"decode-0": "stubborn"}, drain_timeout_s=0.1) as made:
        await made.fleet.start(START_TIMEOUT_S)
        pid = made.record("decode-0")
        assert await made.fleet.drain() == ("decode-0 (signal SIGKILL)",)
        assert not is_running(pid.pid, pid.start_ticks)


async def test_an_endless_line_neither_stops_nor_swells_the_log(tmp_path):
    async with supervised(tmp_path, {"router": "chatty"}) as made:
        await made.fleet.start(START_TIMEOUT_S)
        await until(lambda: ("router", "after the long line") in made.screen.logged, "the line after it")
        assert max(len(line) for _, line in made.screen.logged) < 100


class UpProcess:
    """A supervisor in a process of its own."""

    def __init__(self, folder, *children, on_exit="restart"):
        self.folder = folder
        self.log = folder / "up.log"
        script = Path(fake_children.__file__)
        command = [sys.executable, str(script), str(folder), on_exit, *children]
        tests = str(script.parents[1])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=os.environ | {"PYTHONPATH": tests}
            )
        self.wait_for(lambda: "fleet ready" in self.log.read_text(), "the fleet is ready")
        self.record = StateFile(folder).read()

    def wait_for(self, condition, what):
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, f"never happened: {what}\n{self.log.read_text()}"
            time.sleep(0.01)

    def orphans(self):
        return [child.name for child in self.record.children if is_running(child.pid, child.start_ticks)]

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)


@pytest.fixture
def start_up(tmp_path):
    running = []

    def start(*children, **options):
        running.append(UpProcess(tmp_path, *children, **options))
        return running[-1]

    yield start
    for up in running:
        up.end()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_drains_and_the_exit_code_is_zero(start_up, number):
    up = start_up(*NAMES)
    up.process.send_signal(number)
    assert up.process.wait(WAIT_S) == 0, up.log.read_text()
    assert "drained router" in journal(up.folder)
    assert up.orphans() == []
    assert not StateFile(up.folder).path.exists()


def test_ctrl_c_in_the_terminal_reaches_only_the_supervisor(start_up):
    up = start_up(*NAMES)
    os.killpg(up.process.pid, signal.SIGINT)
    assert up.process.wait(WAIT_S) == 0, up.log.read_text()
    assert not [event for event in journal(up.folder) if event.startswith("interrupted")]


def test_a_second_signal_kills(start_up):
    up = start_up("decode-0:stubborn", "registry")
    up.process.send_signal(signal.SIGINT)
    up.wait_for(lambda: "draining decode-0" in up.log.read_text(), "the drain begins")
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(WAIT_S) == 130, up.log.read_text()
    assert up.orphans() == []


def test_a_killed_supervisor_leaves_no_children(start_up):
    up = start_up(*NAMES, "both-0:stubborn")
    up.process.kill()
    up.process.wait(WAIT_S)
    up.wait_for(lambda: up.orphans() == [], "the children are gone")


def test_a_second_fleet_in_the_same_place_is_refused(start_up, tmp_path):
    start_up("router")
    second = subprocess.run(
        [sys.executable, fake_children.__file__, str(tmp_path), "restart", "router"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(fake_children.__file__).parents[1])},
    )
    assert second.returncode != 0
    assert "a fleet runs here already" in second.stderr


def test_kvrelay_kill_kills_the_child_it_names_and_it_comes_back(start_up, capsys):
    up = start_up("router", "prefill-0")
    assert kvrelay(["kill", "prefill-0", "--state-dir", str(up.folder)]) == 0
    assert "sent SIGKILL to prefill-0" in capsys.readouterr().out
    up.wait_for(lambda: "prefill-0 is back" in up.log.read_text(), "the child comes back")


def test_kvrelay_kill_says_what_there_is_when_it_does_not_know_the_name(start_up, capsys):
    up = start_up("router", "prefill-0")
    assert kvrelay(["kill", "decode-9", "--state-dir", str(up.folder)]) == 1
    assert capsys.readouterr().err == "kvrelay: no decode-9 here; there are router, prefill-0\n"
