"""Answers survive the death of a prefill replica at any moment; nothing leaks; bad input is refused by name."""

import itertools
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.local_fleet import LocalFleet, wait_for
from kvrelay.client import Delta, Part
from kvrelay.config import LIVENESS_TTL_S
from kvrelay.errors import InvalidArgument, KvrelayError
from kvrelay.up.processes import send_signal

RECOVERY_TIMEOUT_S = 60.0
BURST = 64
MOCK = {"engine": "mock", "model": "mock", "disaggregate": "always", "prefill": 1, "decode": 1}
# Slow enough to be met at any stage: 0.2 s for 200 tokens of prompt, 10 ms a token; 1 MiB a token for long pulls.
PACED = "prefill_ms_per_token=1,step_ms=10"
HEAVY = "prefill_ms_per_token=0.1,step_ms=5,kv_bytes_per_token=1048576"


def ids(seed: int, tokens: int = 200) -> list[int]:
    return [1 + (seed * 7919 + index * 31) % 256 for index in range(tokens)]


def exhaust(parts: Iterator[Part]) -> None:
    for _ in parts:
        pass


def send(fleet: LocalFleet, name: str, number: signal.Signals) -> None:
    child = fleet.child(name)
    send_signal(child.pid, child.start_ticks, number)


def used_again(fleet: LocalFleet, old_pid: int, seed: int) -> None:
    """Wait until the restarted prefill replica serves, without decode having been restarted."""
    decode_pid = fleet.child("decode-0").pid
    wait_for("the prefill replica to be restarted", lambda: fleet.child("prefill-0").pid != old_pid)

    unseen = itertools.count(seed)

    def pulled():
        with fleet.client() as client:
            return client.generate(ids(next(unseen)), max_tokens=2).usage.pulled_bytes > 0

    wait_for("decode to pull from the restarted replica", pulled, timeout_s=RECOVERY_TIMEOUT_S)
    assert fleet.child("decode-0").pid == decode_pid


@pytest.fixture(scope="module")
def paced_fleet():
    with LocalFleet(MOCK | {"mock_profile": PACED, "kv_mib": 64}) as fleet:
        yield fleet


def test_prefill_killed_before_the_pull(paced_fleet):
    with paced_fleet.client() as client, ThreadPoolExecutor(1) as pool:
        wanted = client.generate(ids(1, 2000), max_tokens=32, return_ids=True).ids
        restarted = client.generate(ids(2), max_tokens=2).decision.prefill
        pid = paced_fleet.child("prefill-0").pid
        asked = pool.submit(client.generate, ids(3, 2000), max_tokens=32, return_ids=True)
        wait_for("the prompt to be read", lambda: paced_fleet.replicas()["prefill-0"].running > 0)
        send(paced_fleet, "prefill-0", signal.SIGKILL)
        got = asked.result(timeout=RECOVERY_TIMEOUT_S)
        assert len(got.ids) == len(wanted) == 32
        assert got.usage.pulled_bytes == 0
        assert got.finish.prefill_reason
        used_again(paced_fleet, pid, seed=100)
        again = client.generate(ids(3, 2000), max_tokens=32, return_ids=True)
        assert again.ids == got.ids
        assert again.decision.prefill.incarnation != restarted.incarnation


def test_prefill_killed_during_the_pull_over_tcp():
    flags = MOCK | {"mock_profile": HEAVY, "kv_mib": 3072, "max_sequences": 2}
    with LocalFleet(flags, env={"UCX_TLS": "tcp"}) as fleet, fleet.client() as client:
        pid = fleet.child("prefill-0").pid
        prompt = ids(5, 400)
        with client.stream_generate(prompt, max_tokens=16, return_ids=True) as stream:
            parts = iter(stream)
            next(part for part in parts if isinstance(part, Delta))
            # The first token is passed on while 400 MiB are still under way.
            send(fleet, "prefill-0", signal.SIGSTOP)
            send(fleet, "prefill-0", signal.SIGKILL)
            exhaust(parts)
            got = stream.answer
        assert len(got.ids) == 16
        assert got.usage.decode_computed_tokens > 0
        assert got.finish.prefill_reason
        used_again(fleet, pid, seed=200)
        assert client.generate(prompt, max_tokens=16, return_ids=True).ids == got.ids
        quarantined = lambda: sum(r.pages_quarantined for r in fleet.replicas().values()) == 0  # noqa: E731
        wait_for("quarantined pages to come back", quarantined)


def test_prefill_killed_after_the_pull(paced_fleet):
    with paced_fleet.client() as client:
        pid = paced_fleet.child("prefill-0").pid
        with client.stream_generate(ids(7), max_tokens=64, return_ids=True) as stream:
            parts = iter(stream)
            tokens = 0
            while tokens < 4:
                tokens += len(getattr(next(parts), "ids", ()))
            send(paced_fleet, "prefill-0", signal.SIGKILL)
            exhaust(parts)
            got = stream.answer
        assert len(got.ids) == 64
        assert got.usage.pulled_tokens == 200
        used_again(paced_fleet, pid, seed=300)


def test_random_cancels_bring_everything_back_to_the_baseline(paced_fleet):
    rng = random.Random(0)

    def at_rest():
        replicas = paced_fleet.replicas().values()
        idle = all(
            r.running == r.waiting == r.leases == r.pages_quarantined == r.decode_sequences == 0 for r in replicas
        )
        return len(replicas) == 2 and idle and all(r.pages_free == r.pages_total for r in replicas)

    def count(folder):
        pids = {name: paced_fleet.child(name).pid for name in ("prefill-0", "decode-0")}
        return {name: sum(1 for _ in Path(f"/proc/{pid}/{folder}").iterdir()) for name, pid in pids.items()}

    def cancelled(seed):
        with (
            paced_fleet.client() as client,
            client.stream_generate(ids(seed, rng.randrange(1, 600)), max_tokens=64) as stream,
        ):
            end = time.monotonic() + rng.random() * 0.8
            parts = iter(stream)
            while time.monotonic() < end and next(parts, None) is not None:
                pass

    wait_for("the fleet to be at rest", at_rest)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cancelled, range(500, 520)))  # connections and pools that stay open are opened by now
        wait_for("the fleet to be at rest", at_rest)
        before = count("fd"), count("task")
        list(pool.map(cancelled, range(600, 700)))
    wait_for("pages, leases and reservations to come back", at_rest)
    allowed = 8  # connections that one burst may leave open for the next
    for was, now in zip(before, (count("fd"), count("task")), strict=True):
        assert all(now[name] <= was[name] + allowed for name in was), (was, now)


def test_burst_of_requests_at_once_freezes_nobody(paced_fleet):
    answered = threading.Event()

    def status_while_busy():
        """The router and, through heartbeats, every replica go on telling their state."""
        ages = []
        while not answered.is_set():
            seen = paced_fleet.replicas()
            assert len(seen) == 2
            ages += [status.heartbeat_age_s for status in seen.values()]
            assert all(status.state == "ready" for status in seen.values()), seen
        return max(ages)

    with paced_fleet.client() as client, ThreadPoolExecutor(BURST + 1) as pool:
        watching = pool.submit(status_while_busy)
        asked = [pool.submit(client.generate, ids(2000 + i, 40), max_tokens=16) for i in range(BURST)]
        answers = [future.result(timeout=RECOVERY_TIMEOUT_S) for future in asked]
        answered.set()
        assert watching.result(timeout=RECOVERY_TIMEOUT_S) < LIVENESS_TTL_S
    assert all(answer.usage.output_tokens == 16 for answer in answers)


@pytest.mark.parametrize(
    ("field", "limit", "arguments"),
    [
        ("text", "empty", {"prompt": ""}),
        ("prompt", "131072", {"prompt": ids(1, 131_073)}),
        ("prompt_ids", "512", {"prompt": [1, 512]}),
        ("sampling.temperature", "[0, 2]", {"prompt": "hi", "temperature": float("nan")}),
        ("sampling.top_p", "(0, 1]", {"prompt": "hi", "top_p": 0.0}),
        ("sampling.max_tokens", "[1,", {"prompt": "hi", "max_tokens": 0}),
        ("model", "mock", {"prompt": "hi", "model": "nonesuch"}),
        ("priority", "100", {"prompt": "hi", "priority": 101}),
    ],
)
def test_bad_input_is_refused_naming_field_and_limit(paced_fleet, field, limit, arguments):
    options = dict(arguments)
    with paced_fleet.client() as client, pytest.raises(InvalidArgument) as caught:
        client.generate(options.pop("prompt"), **options)
    assert caught.value.field == field
    assert limit in str(caught.value)


def test_errors_are_of_the_one_tree(paced_fleet):
    with paced_fleet.client() as client, pytest.raises(KvrelayError):
        client.generate("hi", deadline_s=0.001)
