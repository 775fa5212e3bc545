"""An answer whose prefill replica dies is the answer of the reference, in fp32: no token lost, repeated or changed."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.prompts import long_ids
from support.reference import reference_tokens

from bench.local_fleet import LocalFleet, wait_for
from kvrelay.client import Delta, Part
from kvrelay.up.processes import send_signal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OUTPUT_TOKENS = 32
ANSWER_TIMEOUT_S = 300.0
WHOLE_PROMPT_KIB = 1 << 20  # KV is announced when the prompt is complete: one long READ, met on its way


@pytest.fixture
def fleet():
    """One prefill and one decode replica in fp32, joined by TCP, as two machines would be."""
    flags = {"dtype": "float32", "kv_mib": 1024, "disaggregate": "always", "piece_kib": WHOLE_PROMPT_KIB}
    with LocalFleet(flags, env={"UCX_TLS": "tcp"}) as fleet:
        yield fleet


def kill_prefill(fleet: LocalFleet, *, stopped: bool = False) -> None:
    """Kill the prefill replica; return when its successor is known to the router."""
    child = fleet.child("prefill-0")
    before = fleet.replicas()["prefill-0"].peer.incarnation
    for number in (signal.SIGSTOP, signal.SIGKILL) if stopped else (signal.SIGKILL,):
        send_signal(child.pid, child.start_ticks, number)

    def back() -> bool:
        seen = fleet.replicas().get("prefill-0")
        return seen is not None and seen.state == "ready" and seen.peer.incarnation != before

    wait_for("the prefill replica to be back", back, timeout_s=ANSWER_TIMEOUT_S)


def check_used_again(fleet: LocalFleet, text) -> None:
    """The restarted replica is pulled from, and decode has not been restarted for it."""
    ids = long_ids(text, 500, seed=99)  # no prompt of the tests here begins like it
    with fleet.client() as client:
        got = client.generate(ids, max_tokens=OUTPUT_TOKENS, ignore_eos=True, return_ids=True)
    assert got.usage.pulled_tokens == len(ids)
    assert list(got.ids) == reference_tokens(ids, OUTPUT_TOKENS)
    assert fleet.child("decode-0").restarts == 0


def rest(parts: Iterator[Part]) -> None:
    for _ in parts:
        pass


def test_killed_while_it_reads_the_prompt(fleet, text):
    ids = long_ids(text, 2000, seed=31)
    with fleet.client() as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.generate, ids, max_tokens=OUTPUT_TOKENS, ignore_eos=True, return_ids=True)
        wait_for("the prompt to be read", lambda: fleet.replicas()["prefill-0"].running > 0)
        kill_prefill(fleet)
        got = asked.result(timeout=ANSWER_TIMEOUT_S)
    assert list(got.ids) == reference_tokens(ids, OUTPUT_TOKENS)
    assert got.usage.decode_computed_tokens > 0
    check_used_again(fleet, text)


@pytest.mark.parametrize(("tokens_seen", "stopped"), [(1, True), (8, False)], ids=["during the pull", "after the pull"])
def test_killed_once_the_answer_has_begun(fleet, text, tokens_seen, stopped):
    ids = long_ids(text, 2000, seed=32 + tokens_seen)
    options = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "return_ids": True}
    with fleet.client() as client, client.stream_generate(ids, **options) as stream:
        parts = iter(stream)
        seen = 0
        while seen < tokens_seen:
            part = next(parts)
            seen += len(part.ids) if isinstance(part, Delta) else 0
        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(kill_prefill, fleet, stopped=stopped)
            rest(parts)
            killing.result(timeout=ANSWER_TIMEOUT_S)
        got = stream.answer
    assert list(got.ids) == reference_tokens(ids, OUTPUT_TOKENS)
    check_used_again(fleet, text)
    print(f"pulled {got.usage.pulled_tokens} tokens, computed {got.usage.decode_computed_tokens} at decode")
