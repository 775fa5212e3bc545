"""What the fleet answers is what the reference answers, token for token in fp32, however the prompt was read."""

import pytest
from support.prompts import CHATS, border_prompts, chat_ids, encode, long_ids, varied_prompts
from support.reference import reference_tokens

from bench.local_fleet import LocalFleet
from kvrelay.config import BLOCK_TOKENS

OUTPUT_TOKENS = 64
OUTPUT_TOKENS_SLICE = 24


def answer(client, ids, tokens):
    return client.generate(ids, max_tokens=tokens, ignore_eos=True, return_ids=True)


def small_set(text):
    sources = ("def fibonacci(n):\n    ", "今日は天気がいいですね。散歩に")
    return [chat_ids(text, CHATS[0]), *(encode(text, source) for source in sources), *border_prompts(text)]


def test_disaggregated_answers_equal_the_reference(split_fleet, text):
    with split_fleet.client() as client:
        for ids in small_set(text):
            got = answer(client, ids, OUTPUT_TOKENS_SLICE)
            assert list(got.ids) == reference_tokens(ids, OUTPUT_TOKENS_SLICE)
            assert got.decision.prefill is not None


def test_cached_prefix_changes_nothing(split_fleet, text):
    prefix = long_ids(text, 300, seed=7)
    with split_fleet.client() as client:
        for question in ("first", "second"):
            ids = prefix + encode(text, f" and the {question} question is")
            assert list(answer(client, ids, OUTPUT_TOKENS_SLICE).ids) == reference_tokens(ids, OUTPUT_TOKENS_SLICE)
        again = answer(client, ids, OUTPUT_TOKENS_SLICE)
        assert list(again.ids) == reference_tokens(ids, OUTPUT_TOKENS_SLICE)
        assert again.usage.cached_tokens > 0


def test_chat_rendered_by_the_router_equals_the_template_rendered_here(split_fleet, text):
    with split_fleet.client() as client:
        assert list(client.tokenize(CHATS[0]).ids) == chat_ids(text, CHATS[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestWholeSet:
    """Twenty varied prompts, one of 6,000 tokens, 64 tokens each, through every way a prompt can be read."""

    @pytest.mark.parametrize(
        "flags",
        [
            pytest.param({"prefill": 1, "decode": 1, "disaggregate": "always"}, id="disaggregated"),
            pytest.param({"prefill": 0, "decode": 0, "both": 1}, id="aggregated"),
            pytest.param({"prefill": 1, "decode": 1, "disaggregate": "always", "chunk_tokens": 48}, id="chunked"),
        ],
    )
    def test_fleet_equals_the_reference(self, flags, text):
        with LocalFleet(flags | {"dtype": "float32", "kv_mib": 1024}) as fleet, fleet.client() as client:
            for ids in varied_prompts(text):
                assert list(answer(client, ids, OUTPUT_TOKENS).ids) == reference_tokens(ids, OUTPUT_TOKENS)

    def test_cached_prefixes_change_nothing(self, split_fleet, text):
        with split_fleet.client() as client:
            for ids in varied_prompts(text):
                answer(client, ids, 1)  # fills both replicas' caches
                again = answer(client, ids, OUTPUT_TOKENS)
                assert list(again.ids) == reference_tokens(ids, OUTPUT_TOKENS)
                assert again.usage.cached_tokens + again.usage.prefill_cached_tokens > 0 or len(ids) <= BLOCK_TOKENS
