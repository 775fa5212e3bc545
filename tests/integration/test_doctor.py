"""`kvrelay doctor` on the machine that runs the tests."""

import json
from functools import cache

import pytest

from kvrelay.cli.main import main as kvrelay
from kvrelay.doctor import examine as examination
from kvrelay.doctor.catalogue import CHECKS
from kvrelay.doctor.probe import run_probe


def examine(capsys, *words):
    """Run the command; return its exit code and its findings by check."""
    capsys.readouterr()
    code = kvrelay(["doctor", "--json", *words])
    findings = {}
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        findings.setdefault(finding["check"], []).append(finding)
    return code, findings


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No fleet but the one that a test names."""
    for name in ("KVRELAY_ADDRESS", "KVRELAY_REGISTRY", "KVRELAY_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def looked_once():
    """What the slow probes told, kept for the tests that are about something else."""
    return cache(run_probe)


@pytest.fixture
def quick(monkeypatch, looked_once):
    """Answer the slow probes out of memory."""
    monkeypatch.setattr(examination, "run_probe", lambda module, **_: looked_once(module))


def test_without_a_fleet_it_examines_the_machine_and_measures_the_path_of_kv(capsys):
    code, findings = examine(capsys)
    assert code == 0, findings
    assert list(findings) == list(CHECKS)
    (bandwidth,) = findings["nixl bandwidth"]
    assert "READ" in bandwidth["found"]
    assert "GB/s over " in bandwidth["found"]
    assert {findings[check][0]["status"] for check in ("redis", "router", "registry", "replicas", "skew")} == {
        "skipped"
    }


def test_tcp_alone_is_noticed(capsys, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    _, findings = examine(capsys)
    (bandwidth,) = findings["nixl bandwidth"]
    assert bandwidth["status"] == "warn"
    assert "tcp" in bandwidth["found"]
    assert "UCX_TLS" in bandwidth["advice"]


@pytest.mark.usefixtures("quick")
def test_a_running_store_is_measured(capsys, valkey):
    _, findings = examine(capsys, "--redis-url", valkey.url)
    assert findings["redis"][0]["found"].startswith("Valkey ")
    assert "50 pings" in findings["redis"][0]["found"]
    assert findings["redis memory"][0]["status"] == "ok"


@pytest.mark.usefixtures("quick")
def test_a_store_that_would_evict_is_refused(capsys, valkey):
    with valkey.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    code, findings = examine(capsys, "--redis-url", valkey.url)
    assert code == 1
    assert findings["redis memory"][0]["status"] == "fail"
    assert "noeviction" in findings["redis memory"][0]["advice"]


@pytest.mark.usefixtures("quick")
def test_a_store_that_hangs_or_is_gone_does_not_hold_it_up(capsys, valkey):
    with valkey.stopped():
        code, findings = examine(capsys, "--redis-url", valkey.url)
    assert code == 1
    assert "start Redis" in findings["redis"][0]["advice"]
    valkey.kill()
    code, findings = examine(capsys, "--redis-url", valkey.url)
    assert code == 1
    assert findings["redis"][0]["status"] == "fail"
    valkey.start()


@pytest.mark.usefixtures("quick")
def test_a_fleet_that_is_named_and_not_there_is_a_failure(capsys):
    code, findings = examine(capsys, "--address", "127.0.0.1:1", "--registry", "127.0.0.1:1")
    assert code == 1
    assert findings["router"][0]["status"] == "fail"
    assert findings["registry"][0]["status"] == "fail"
