"""`kvrelay doctor` beside a running fleet."""

import json
import os
import signal
from functools import cache

import pytest

from bench.local_fleet import LocalFleet, wait_for
from kvrelay.cli.main import main as kvrelay
from kvrelay.doctor import examine as examination
from kvrelay.doctor.probe import run_probe

FLAGS = {"engine": "mock", "kv_mib": 64}


@pytest.fixture(scope="module")
def fleet():
    with LocalFleet(FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def looked_once():
    return cache(run_probe)


@pytest.fixture(autouse=True)
def quick(monkeypatch, looked_once):
    """Let the slow probes, which know nothing of the fleet, run once for all tests here."""
    monkeypatch.setattr(examination, "run_probe", lambda module, **_: looked_once(module))


def examine(fleet, capsys):
    """Run the command; return its exit code and its findings as (check, status, found, advice)."""
    capsys.readouterr()
    code = kvrelay(["doctor", "--json", "--state-dir", str(fleet.folder)])
    return code, [tuple(finding.values()) for finding in json.loads(capsys.readouterr().out)["findings"]]


def of(findings, check):
    return [finding[1:] for finding in findings if finding[0] == check]


def test_a_fleet_that_is_well_is_shown_replica_by_replica(fleet, capsys):
    code, findings = examine(fleet, capsys)
    assert code == 0, findings
    assert [(status, found.partition(",")[0]) for status, found, _ in of(findings, "replicas")] == [
        ("ok", "decode-0"),
        ("ok", "prefill-0"),
    ]
    for check in ("redis", "redis memory", "router", "registry", "addresses", "heartbeats", "skew", "ucx libraries"):
        assert [finding[0] for finding in of(findings, check)] == ["ok"], of(findings, check)


def test_a_stopped_replica_is_named(fleet, capsys):
    pid = fleet.child("prefill-0").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for("the router to give it up", lambda: "prefill-0" not in ready(fleet))
        code, findings = examine(fleet, capsys)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert code == 1
    failing = [found for status, found, _ in of(findings, "replicas") if status == "fail"]
    assert [found.partition(",")[0] for found in failing] == ["prefill-0"]
    wait_for("it to be back", lambda: "prefill-0" in ready(fleet))


def test_a_stopped_store_is_told_with_what_to_do(fleet, capsys):
    pid = fleet.child("store").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for("the router to be degraded", lambda: state(fleet) == "degraded")
        code, findings = examine(fleet, capsys)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert code == 1
    ((status, _, advice),) = of(findings, "redis")
    assert status == "fail"
    assert "start Redis" in advice
    assert "see redis" in of(findings, "registry")[0][2]
    wait_for("the fleet to be well again", lambda: state(fleet) == "ready" and len(ready(fleet)) == 2)


def ready(fleet):
    return {name for name, replica in fleet.replicas().items() if replica.state == "ready"}


def state(fleet):
    with fleet.client() as client:
        return client.status().state
