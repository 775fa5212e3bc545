"""The hand-off is real: KV bytes go through NIXL, decode computes none of the prompt, a cached prefix is not pulled."""

from support.prompts import encode, long_ids

from kvrelay.config import PAGE_TOKENS_CPU

LAYERS, KV_HEADS, HEAD_DIM, FP32_BYTES = 30, 3, 64, 4
PAGE_BYTES = LAYERS * 2 * KV_HEADS * PAGE_TOKENS_CPU * HEAD_DIM * FP32_BYTES


def pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS_CPU)


def test_prompt_is_pulled_through_nixl_and_not_computed_by_decode(split_fleet, text):
    ids = long_ids(text, 330, seed=11)
    with split_fleet.client() as client:
        usage = client.generate(ids, max_tokens=4).usage
    assert usage.pulled_bytes == pages(330) * PAGE_BYTES  # counted by NIXL's own telemetry
    assert usage.pulled_tokens == 330
    assert usage.pull_s > 0
    assert usage.decode_computed_tokens <= 1
    assert usage.computed_tokens == 330


def test_cached_prefix_makes_the_pull_smaller_by_its_pages(split_fleet, text):
    prefix = long_ids(text, 10 * PAGE_TOKENS_CPU, seed=12)
    with split_fleet.client() as client:
        client.generate(prefix + encode(text, " one"), max_tokens=4)
        ids = prefix + encode(text, " two and a half")
        usage = client.generate(ids, max_tokens=4).usage
    assert usage.cached_tokens == len(prefix)
    assert usage.prefill_cached_tokens == len(prefix)
    assert usage.pulled_bytes == (pages(len(ids)) - 10) * PAGE_BYTES
    assert usage.pulled_tokens == len(ids) - len(prefix)
