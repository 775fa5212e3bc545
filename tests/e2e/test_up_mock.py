"""`kvrelay up` as its user sees it: one command starts a fleet that answers, mends itself, and ends cleanly."""

import json
import signal

import pytest

from bench.local_fleet import LocalFleet, wait_for
from kvrelay.cli.main import main as kvrelay
from kvrelay.up.processes import is_running

FLAGS = {"engine": "mock", "kv_mib": 64, "disaggregate": "always"}


def ids(seed, tokens=400):
    """Token ids that no other seed begins with."""
    return [(seed * 37 + position * position) % 500 + 1 for position in range(tokens)]


@pytest.fixture(scope="module")
def fleet():
    with LocalFleet(FLAGS) as running:
        yield running


def run(fleet, capsys, *words):
    """Run a command against the fleet; return its exit code and what it printed."""
    capsys.readouterr()
    code = kvrelay([*words, "--state-dir", str(fleet.folder)])
    return code, capsys.readouterr()


def test_prompts_are_read_by_prefill_and_pulled_by_decode(fleet):
    with fleet.client() as client:
        answer = client.generate(ids(1), max_tokens=8, ignore_eos=True)
    assert answer.usage.output_tokens == 8
    assert answer.usage.pulled_bytes > 0
    assert answer.finish.prefill.replica_id == "prefill-0"
    assert answer.decision.decode.replica_id == "decode-0"


def test_commands_find_the_fleet_by_its_state_directory(fleet, capsys):
    code, shown = run(fleet, capsys, "generate", "some text", "--max-tokens", "4", "--stats")
    assert code == 0
    assert "prefill-0 → decode-0" in shown.err
    code, shown = run(fleet, capsys, "chat", "a message", "--max-tokens", "4")
    assert (code, shown.err) == (0, "")


def test_status_shows_every_replica(fleet, capsys):
    code, shown = run(fleet, capsys, "status")
    assert code == 0
    assert "prefill-0" in shown.out
    assert "decode-0" in shown.out
    code, shown = run(fleet, capsys, "status", "--json")
    assert code == 0
    assert {replica["state"] for replica in json.loads(shown.out)["replicas"]} == {"ready"}


def test_every_process_is_healthy(fleet, capsys):
    for child in fleet.record.children:
        if child.kind != "store":
            assert kvrelay(["health", child.address]) == 0
    assert set(capsys.readouterr().out.split("\n")) == {"serving", ""}


def test_a_killed_replica_comes_back_and_is_used_again(fleet, capsys):
    before = fleet.replicas()["prefill-0"].peer
    code, shown = run(fleet, capsys, "kill", "prefill-0")
    assert (code, shown.err) == (0, "")

    def back():
        replica = fleet.replicas().get("prefill-0")
        return replica and replica.state == "ready" and replica.peer.incarnation != before.incarnation

    wait_for("prefill-0 to be back", back)
    assert fleet.replicas()["prefill-0"].peer.address == before.address
    with fleet.client() as client:
        wait_for(
            "prefill-0 to be used again",
            lambda: client.generate(ids(next(UNSEEN)), max_tokens=4).usage.pulled_bytes,
        )


UNSEEN = iter(range(2, 1000))


def test_ctrl_c_drains_and_leaves_nothing():
    fleet = LocalFleet(FLAGS)
    fleet.start()
    children = fleet.record.children
    assert {child.name for child in children} == {"store", "registry", "router", "prefill-0", "decode-0"}
    assert fleet.stop(signal.SIGINT) == 0
    assert [child.name for child in children if is_running(child.pid, child.start_ticks)] == []
