"""Requests go where their prefix lies, unless that replica is over its cap."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.local_fleet import LocalFleet, wait_for

BLOCK = 32


def prompt(seed: int, tokens: int = 10 * BLOCK) -> list[int]:
    """Token ids of the mock model that differ from the first block on."""
    return [1 + (seed * 7919 + index * 31) % 256 for index in range(tokens)]


def holders(fleet: LocalFleet) -> int:
    return sum(status.blocks > 0 for status in fleet.replicas().values())


def test_requests_with_one_prefix_meet_at_its_holder(mock_fleet):
    shared = prompt(1)
    with mock_fleet.client() as client:
        first = client.generate(shared + prompt(100, 40), max_tokens=4).decision
        wait_for("the blocks to be announced", lambda: holders(mock_fleet) >= 2)
        for seed in range(101, 109):
            decision = client.generate(shared + prompt(seed, 40), max_tokens=4).decision
            assert decision.prefill == first.prefill
            assert decision.prefill_cached_tokens == len(shared)
            assert decision.available_tokens >= len(shared)


def test_over_the_cap_requests_with_one_prefix_spill(mock_fleet):
    shared = prompt(2, 40 * BLOCK)
    with mock_fleet.client() as client, ThreadPoolExecutor(32) as pool:
        client.generate(shared, max_tokens=1)
        asked = [pool.submit(client.generate, shared + prompt(200 + i, 20 * BLOCK), max_tokens=16) for i in range(64)]
        decisions = [future.result(timeout=120).decision for future in asked]
    taken = Counter(decision.prefill.replica_id for decision in decisions)
    assert set(taken) == {"prefill-0", "prefill-1"}, taken


def test_equal_cold_replicas_share_evenly(mock_fleet):
    with mock_fleet.client() as client:
        decisions = [client.generate(prompt(1000 + seed, 4 * BLOCK), max_tokens=2).decision for seed in range(60)]
    for role in ("prefill", "decode"):
        taken = Counter(getattr(decision, role).replica_id for decision in decisions)
        # Two equal replicas, 60 draws: fewer than 12 for one of them has a chance below 1 in 500,000.
        assert min(taken[f"{role}-0"], taken[f"{role}-1"]) >= 12, taken


@pytest.mark.parametrize("tokens", [8, 40])
def test_short_prompt_on_an_idle_fleet_is_read_locally_and_the_decision_says_why(tokens):
    flags = {"prefill": 1, "decode": 1, "engine": "mock", "model": "mock", "kv_mib": 16, "disaggregate": "auto"}
    with LocalFleet(flags) as fleet, fleet.client() as client:
        got = client.generate(prompt(3, tokens), max_tokens=4)
    assert got.decision.prefill is None
    assert got.decision.decider_reason
    assert got.usage.pulled_bytes == 0
