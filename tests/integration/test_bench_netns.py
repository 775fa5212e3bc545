"""The two hosts on one machine that benchmarks use. Needs root and iproute2; skipped without."""

import subprocess

import pytest

from bench import netns
from bench.netns import NotPossibleError, TwoHosts

TIMEOUT_S = 60.0


@pytest.fixture
def hosts():
    try:
        with TwoHosts() as both:
            yield both
    except NotPossibleError as error:
        pytest.skip(str(error))


def listed(command):
    return subprocess.run(command.split(), capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout


def inside(hosts, end, command):
    done = subprocess.run(
        hosts.command(end, command.split()), capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    return done.stdout


def test_the_hosts_have_a_link_and_a_way_in_and_the_link_can_be_slowed_and_freed(hosts):
    for end in ("a", "b"):
        assert hosts.address[end] in inside(hosts, end, "ip -4 address")
    assert hosts.entrance in inside(hosts, "b", "ip -4 address")
    hosts.slow(1e6)
    assert "tbf" in inside(hosts, "a", "tc qdisc")
    hosts.slow(2e6)
    assert "16Mbit" in inside(hosts, "a", "tc qdisc")
    hosts.free()
    assert "tbf" not in inside(hosts, "a", "tc qdisc")


def test_two_runs_do_not_meet_and_nothing_is_left_when_one_fails(hosts):
    def fail(seen):
        with others:
            seen.append(listed("ip netns list"))
            raise KeyError

    others = TwoHosts()
    run = others.device["a"].removeprefix("kv").removesuffix("a")
    seen = []
    with pytest.raises(KeyError):
        fail(seen)
    assert others.device != hosts.device
    assert run in seen[0]
    assert run not in listed("ip netns list") + listed("ip link")


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(netns.shutil, "which", lambda _: None)
    with pytest.raises(NotPossibleError, match="install iproute2"):
        netns.check()
    monkeypatch.setattr(netns.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    with pytest.raises(NotPossibleError, match="needs root"):
        netns.check()
