"""The next turn of a 6,000-token conversation costs its new tokens and at most a block more, wherever it is read."""

import pytest

from bench.local_fleet import LocalFleet, wait_for

BLOCK = 32
KV_TOKEN_BYTES = 64
FIRST_TOKENS = 6000
ANSWER_TOKENS = 200
USER_TOKENS = 50
HELD = (FIRST_TOKENS + ANSWER_TOKENS - 1) // BLOCK * BLOCK
"""What decode holds after the first turn: whole blocks; the KV of the answer's last token was never needed."""

PROFILE = "prefill_ms_per_token=0.5,step_ms=1"
"""Slow enough that a few blocks over shared memory are loaded sooner than computed."""


def prompt(seed: int, tokens: int) -> list[int]:
    return [1 + (seed * 7919 + index * 31) % 256 for index in range(tokens)]


def bytes_of(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK * KV_TOKEN_BYTES


def fleet(rule: str) -> LocalFleet:
    flags = {"engine": "mock", "model": "mock", "mock_profile": PROFILE, "kv_mib": 16, "disaggregate": rule}
    return LocalFleet(flags | {"prefill": 1, "decode": 1})


def two_turns(fleet: LocalFleet):
    """Have a conversation; return its second answer and how many tokens its prompt had."""
    ids = prompt(1, FIRST_TOKENS)
    with fleet.client() as client:
        first = client.generate(ids, max_tokens=ANSWER_TOKENS, ignore_eos=True, return_ids=True)
        wait_for("decode's blocks to be known", lambda: fleet.replicas()["decode-0"].blocks >= HELD // BLOCK)
        turn = ids + list(first.ids) + prompt(2, USER_TOKENS)
        return client.generate(turn, max_tokens=8, ignore_eos=True, return_ids=True), len(turn)


def test_read_remotely_the_answer_goes_to_prefill_and_the_new_tokens_come_back():
    with fleet("always") as running:
        got, tokens = two_turns(running)
    usage, new = got.usage, tokens - HELD
    assert got.decision.prefill.replica_id == "prefill-0"
    assert got.decision.holder.replica_id == "decode-0"
    assert new <= USER_TOKENS + BLOCK
    assert usage.cached_tokens == HELD
    assert usage.prefill_cached_tokens == FIRST_TOKENS // BLOCK * BLOCK
    assert usage.prefill_pulled_tokens == HELD - usage.prefill_cached_tokens <= ANSWER_TOKENS + BLOCK
    assert usage.prefill_pulled_bytes == bytes_of(usage.prefill_pulled_tokens)
    assert (usage.computed_tokens, usage.decode_computed_tokens) == (new, 0)
    assert (usage.pulled_tokens, usage.pulled_bytes) == (new, bytes_of(new))


@pytest.mark.parametrize("rule", ["auto", "never"])
def test_read_locally_nothing_is_moved(rule):
    with fleet(rule) as running:
        got, tokens = two_turns(running)
    usage, new = got.usage, tokens - HELD
    assert got.decision.prefill is None
    assert got.decision.holder is None
    assert usage.cached_tokens == HELD
    assert usage.computed_tokens == usage.decode_computed_tokens == new <= USER_TOKENS + BLOCK
    assert (usage.pulled_tokens, usage.pulled_bytes) == (0, 0)
    assert (usage.prefill_pulled_tokens, usage.prefill_pulled_bytes) == (0, 0)
