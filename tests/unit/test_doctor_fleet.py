"""What `kvrelay doctor` makes of a fleet and its store, and how it shows what it found."""

import argparse
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.registry import LAYOUT, replica_of

from kvrelay.cli import doctor
from kvrelay.client import FleetStatus, ReplicaStatus
from kvrelay.doctor import examine, fleet, store
from kvrelay.doctor.catalogue import CHECKS
from kvrelay.doctor.finding import Status, fail, ok, skipped, warn
from kvrelay.doctor.fleet import UNKNOWN, Heard, Sight
from kvrelay.doctor.store import StoreFacts
from kvrelay.types import Peer, Role
from kvrelay.up.probes import NOT_SERVING, SERVING
from kvrelay.up.processes import start_ticks
from kvrelay.up.state import ChildRecord, FleetRecord, StateFile

OPERATING = Path(__file__).parents[2] / "docs/operating.md"
EVERY = "0.0.0.0"  # noqa: S104 - compared with, not bound to
FAST_S = tuple(index * 1e-5 for index in range(1, 51))
INFO = {
    "redis_version": "7.2.4",
    "valkey_version": "9.1.2",
    "used_memory": 2_000_000,
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
}


def facts(**changes):
    given = {"url": "redis://h:1", "round_trips_s": FAST_S, "info": INFO}
    return StoreFacts(**(given | changes))


def status_of(*replicas, state="ready"):
    return FleetStatus(state=state, policy="random", disaggregate="auto", block_tokens=32, replicas=replicas)


def replica_status(name, *, state="ready", age_s=0.2):
    return ReplicaStatus(
        peer=Peer(name, "i", "h:1"),
        role=Role.BOTH,
        model="m",
        state=state,
        prefill_load_s=0.0,
        decode_sequences=0,
        decode_tokens=0,
        blocks=0,
        pages_total=1,
        pages_free=1,
        pages_quarantined=0,
        leases=0,
        running=0,
        waiting=0,
        steps=0,
        heartbeat_age_s=age_s,
    )


def heard_of(*names, beating=None, **changes):
    members = {name: replica_of(name) for name in names}
    return Heard(members=members, beating=set(names if beating is None else beating), caught_up=True, **changes)


def args(*words):
    parser = argparse.ArgumentParser()
    doctor.add_flags(parser)
    return parser.parse_args(words)


# ---------------------------------------------------------------- store


def test_a_store_that_answers_fast():
    finding = store.check_store(facts())
    assert finding.status is Status.OK
    assert finding.found == "Valkey 9.1.2 at redis://h:1: PING p50 0.26 ms, p99 0.50 ms (50 pings)"


def test_a_slow_store():
    assert store.check_store(facts(round_trips_s=(*FAST_S[:-1], 0.2))).status is Status.WARN


def test_a_store_that_does_not_answer():
    finding = store.check_store(facts(error="Connection refused"))
    assert finding.status is Status.FAIL
    assert "start Redis" in finding.advice


def test_a_store_without_a_client_or_a_url_is_a_finding():
    assert "no URL" in store.ask("nonsense").error


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, Status.OK, "2.0 MB used of no limit"),
        ({"maxmemory_policy": "allkeys-lru"}, Status.FAIL, "noeviction"),
        ({"maxmemory": 2_100_000}, Status.WARN, "raise maxmemory"),
        ({"maxmemory": 4_000_000}, Status.OK, "of 4 MB"),
    ],
)
def test_the_store_must_not_evict_and_not_be_full(changes, status, words):
    finding = store.check_store_memory(facts(info=INFO | changes))
    assert finding.status is status
    assert words in finding.found + finding.advice


def test_passwords_are_not_shown():
    assert store.without_password("redis://user:secret@h:6379/0") == "redis://***@h:6379/0"
    assert store.without_password("unix:///tmp/s") == "unix:///tmp/s"


# ---------------------------------------------------------------- fleet


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("router h:1: away", Status.FAIL),
        (status_of(), Status.OK),
        (status_of(state="degraded"), Status.WARN),
        (status_of(state="starting"), Status.WARN),
    ],
)
def test_the_router(told, status):
    assert fleet.check_router(told).status is status


@pytest.mark.parametrize(
    ("health", "heard", "status", "words"),
    [
        (SERVING, heard_of("a", "b"), Status.OK, "2 replicas"),
        (SERVING, heard_of(), Status.WARN, "--model"),
        (SERVING, Heard(error="no answer within 10 s"), Status.FAIL, "no answer"),
        (NOT_SERVING, Heard(), Status.FAIL, "see redis"),
        ("no answer (UNAVAILABLE)", Heard(), Status.FAIL, "start kvrelay registry"),
    ],
)
def test_the_registry(health, heard, status, words):
    finding = fleet.check_registry(health, heard, ["m"])
    assert finding.status is status
    assert words in finding.found + finding.advice


@pytest.mark.parametrize(
    ("state", "health", "status", "words"),
    [
        ("ready", SERVING, Status.OK, "ready, serving"),
        ("", SERVING, Status.OK, "serving"),
        ("draining", NOT_SERVING, Status.WARN, "ends when its streams have"),
        ("stalled", NOT_SERVING, Status.FAIL, "takes no step"),
        ("ready", NOT_SERVING, Status.FAIL, "its own check fails"),
        ("lost", SERVING, Status.FAIL, "whether it runs"),
        ("ready", "no answer (DEADLINE_EXCEEDED)", Status.FAIL, "whether it runs"),
        (UNKNOWN, SERVING, Status.FAIL, "has not entered"),
        (UNKNOWN, "no answer (UNAVAILABLE)", Status.FAIL, "unknown to the router"),
    ],
)
def test_a_replica(state, health, status, words):
    sight = Sight(name="decode-0", where="decode at h:1", state=state, health=health)
    (finding,) = fleet.check_replicas([sight])
    assert finding.status is status
    assert finding.found.startswith("decode-0, decode at h:1: ")
    assert words in finding.found + finding.advice


def test_a_fleet_without_replicas():
    assert [finding.status for finding in fleet.check_replicas([])] == [Status.FAIL]


@pytest.mark.parametrize(
    ("told", "heard", "status", "words"),
    [
        (status_of(replica_status("a")), heard_of("a"), Status.OK, "all 1"),
        (status_of(replica_status("a")), None, Status.OK, "oldest 0.2 s"),
        ("away", heard_of("a", "b", beating=["a"]), Status.FAIL, "none of b"),
        (status_of(replica_status("a", age_s=4.0)), heard_of("a"), Status.WARN, "see cores"),
        (status_of(replica_status("a", age_s=4.0)), Heard(), Status.WARN, "see registry"),
        ("away", None, Status.SKIPPED, "neither"),
    ],
)
def test_heartbeats(told, heard, status, words):
    finding = fleet.check_heartbeats(told, heard)
    assert finding.status is status
    assert words in finding.found + finding.advice


def test_replicas_that_agree():
    assert fleet.check_skew(heard_of("a", "b").members).status is Status.OK
    assert fleet.check_skew({}).status is Status.SKIPPED


def test_replicas_that_differ_are_named_with_the_field():
    members = heard_of("a", "b").members
    members["b"] = replace(members["b"], layout=replace(LAYOUT, dtype="bfloat16"))
    finding = fleet.check_skew(members)
    assert finding.status is Status.WARN
    assert "dtype differs: float32 on a; bfloat16 on b" in finding.found


def test_replicas_of_other_models_need_not_agree():
    members = heard_of("a", "b").members
    members["b"] = replace(members["b"], identity=replace(members["b"].identity, model="other", model_fingerprint="f2"))
    assert fleet.check_skew(members).status is Status.OK


def test_a_fleet_of_another_protocol_version():
    members = heard_of("a").members
    members["a"] = replace(members["a"], identity=replace(members["a"].identity, protocol_minor=7))
    assert "protocol 1.7, this program 1.0" in fleet.check_skew(members).found


# ---------------------------------------------------------------- the command


def test_nothing_is_named_and_nothing_runs(tmp_path):
    patient = doctor.make_patient(args("--state-dir", str(tmp_path)), {})
    assert (patient.routers, patient.registry, patient.redis_url) == ((), "", "")
    assert "--address" in patient.why_no_fleet


def test_the_local_fleet_is_found_by_its_state_file(tmp_path):
    child = ChildRecord(name="prefill-0", kind="prefill", address="h:1", pid=1, start_ticks=1, restarts=0)
    other = ChildRecord(name="router", kind="router", address="h:9", pid=1, start_ticks=1, restarts=0)
    record = FleetRecord(
        pid=1, start_ticks=start_ticks(1), router="h:9", registry="h:8", redis_url="unix:///s", children=(child, other)
    )
    StateFile(tmp_path).write(record)
    patient = doctor.make_patient(args("--state-dir", str(tmp_path)), {})
    assert (patient.routers, patient.registry, patient.redis_url) == (("h:9",), "h:8", "unix:///s")
    assert patient.replicas == (child,)


def test_what_is_named_wins_over_what_runs_here(tmp_path):
    StateFile(tmp_path).write(
        FleetRecord(pid=1, start_ticks=start_ticks(1), router="h:9", registry="h:8", redis_url="unix:///s")
    )
    flags = args("--state-dir", str(tmp_path), "--address", "far:1", "--bind", EVERY, "--advertise", "here")
    patient = doctor.make_patient(flags, {"KVRELAY_REGISTRY": "far:2"})
    assert (patient.routers, patient.registry, patient.redis_url) == (("far:1",), "far:2", "")
    assert (patient.bind, patient.advertise, patient.record) == (EVERY, "here", None)


FINDINGS = [
    ok("python", "3.11"),
    warn("cma", "off", "turn it on"),
    fail("redis", "away", "start it"),
    skipped("nics", "x"),
]


def test_the_table_shows_what_to_do_under_what_was_found():
    screen = io.StringIO()
    Console(file=screen, width=80).print(doctor.make_table(FINDINGS))
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert lines == [
        "check   state    found",
        "python  ok       3.11",
        "cma     warn     off",
        "                 → turn it on",
        "redis   fail     away",
        "                 → start it",
        "nics    skipped  x",
    ]
    assert doctor.summary(FINDINGS) == "1 ok, 1 warn, 1 fail, 1 skipped"


def test_only_failures_change_the_exit_code():
    assert doctor.failed(FINDINGS)
    assert not doctor.failed([finding for finding in FINDINGS if finding.status is not Status.FAIL])
    told = json.loads(json.dumps(doctor.as_json(FINDINGS)))
    assert told["ok"] is False
    assert told["findings"][1] == {"check": "cma", "status": "warn", "found": "off", "advice": "turn it on"}


def test_a_check_that_breaks_leaves_the_others():
    notes = examine.Notes()
    with notes.guard("redis", "redis memory"):
        raise ZeroDivisionError("x")
    assert [(finding.check, finding.status) for finding in notes.findings] == [
        ("redis", Status.WARN),
        ("redis memory", Status.WARN),
    ]
    assert "ZeroDivisionError" in notes.findings[0].found


def test_the_documentation_lists_every_check():
    section = OPERATING.read_text().partition("## When something is wrong")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([a-z -]+?) \| (.+) \|$", section, flags=re.MULTILINE))
    rows.pop("check", None)
    assert rows == CHECKS
