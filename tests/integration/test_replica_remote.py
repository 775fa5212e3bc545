"""A prompt read by a prefill replica, its KV pulled over NIXL, the answer written by a decode replica."""

from support.replicas import at_rest, generate, order, prompt, replica

from kvrelay.types import FinishReason

PAGE = 32


async def test_a_remote_answer_equals_the_local_one():
    async with replica("prefill") as prefill, replica("decode") as decode, replica("decode") as alone:
        for seed, tokens in enumerate((5, PAGE - 1, PAGE, PAGE + 1, 200, 1000)):
            ids = prompt(seed, tokens)
            local = await generate(alone, order(alone, ids))
            remote = await generate(decode, order(decode, ids, targets=[prefill.peer]))
            assert remote.ids == local.ids
            assert remote.positions == list(range(tokens, tokens + 16))
            assert remote.legs == [("started", ""), ("ready", ""), ("pulled", "")]
            assert remote.usage.pulled_tokens == tokens
            assert remote.usage.computed_tokens == tokens
            assert remote.usage.decode_computed_tokens == 0
            assert remote.usage.pulled_bytes == -(-tokens // PAGE) * PAGE * 64
        await at_rest(prefill, decode, alone)


async def test_what_decode_holds_is_neither_leased_nor_pulled_again():
    async with replica("prefill") as prefill, replica("decode") as decode:
        ids = prompt(1, 200)
        first = await generate(decode, order(decode, ids, targets=[prefill.peer]))
        again = await generate(decode, order(decode, ids, targets=[prefill.peer]))
        assert again.ids == first.ids
        assert again.held == 192
        assert again.usage.cached_tokens == 192
        assert again.usage.pulled_tokens == 8
        assert again.usage.prefill_cached_tokens == 192
        assert again.usage.pulled_bytes == PAGE * 64


async def test_a_first_token_that_ends_the_answer_frees_the_lease_unpulled():
    async with replica("prefill") as prefill, replica("decode") as decode:
        answer = await generate(decode, order(decode, prompt(2, 100), targets=[prefill.peer], max_tokens=1))
        assert len(answer.ids) == 1
        assert answer.reason is FinishReason.LENGTH
        assert answer.usage.output_tokens == 1
        assert answer.usage.computed_tokens == 100
        assert answer.usage.pulled_bytes == 0
        await at_rest(prefill, decode)
