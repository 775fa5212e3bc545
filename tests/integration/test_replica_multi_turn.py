"""The next turn of a conversation: what is computed and what is moved, by direction and by where the prompt is read."""

import pytest
from support.holders import bytes_of, whole, with_holder
from support.replicas import Answer, at_rest, generate, order, prompt, replica
from support.rpc import until
from support.tiny import make_tiny

from kvrelay.kv.load_times import LoadTimes
from kvrelay.replica import prefix_pull
from kvrelay.replica.process import ReplicaProcess

BLOCK = 32
FIRST_TOKENS = 6000
ANSWER_TOKENS = 200
USER_TOKENS = 50
GREEDY = {"sampling": {"ignore_eos": True}}
SLOW = "prefill_ms_per_token=0.2"
"""Computing a block takes 6 ms, so that loading a few blocks over shared memory is the faster side."""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nothing here fails, so nothing is to be given up on a busy machine."""
    monkeypatch.setattr(prefix_pull, "PATIENCE_MIN_S", prefix_pull.PATIENCE_MAX_S)


async def first_turn(decode: ReplicaProcess, prefill: ReplicaProcess | None) -> tuple[list[int], Answer]:
    ids = prompt(1, FIRST_TOKENS)
    targets = [] if prefill is None else [prefill.peer]
    return ids, await generate(decode, order(decode, ids, targets=targets, max_tokens=ANSWER_TOKENS))


def next_turn(ids: list[int], answer: Answer) -> list[int]:
    return ids + answer.ids + prompt(2, USER_TOKENS)


async def test_decode_holds_the_conversation_with_its_answer():
    async with replica("decode", kv_mib=4) as decode:
        ids, answer = await first_turn(decode, None)
        turn = next_turn(ids, answer)
        again = await generate(decode, order(decode, turn))
        # The KV of the answer's last token was never computed: its block is the one that is read again.
        held = whole(FIRST_TOKENS + ANSWER_TOKENS - 1)
        assert again.held == again.usage.cached_tokens == held
        assert again.usage.computed_tokens == again.usage.decode_computed_tokens == len(turn) - held
        assert again.usage.computed_tokens <= USER_TOKENS + BLOCK
        assert (again.usage.pulled_tokens, again.usage.pulled_bytes) == (0, 0)


async def test_a_remote_next_turn_moves_the_answer_one_way_and_the_new_tokens_the_other():
    async with (
        replica("prefill", kv_mib=4, mock_profile=SLOW) as prefill,
        replica("decode", kv_mib=4) as decode,
        replica("decode", kv_mib=4) as alone,
    ):
        ids, answer = await first_turn(decode, prefill)
        turn = next_turn(ids, answer)
        expected = await generate(alone, order(alone, turn))
        held, prefill_had = whole(FIRST_TOKENS + ANSWER_TOKENS - 1), whole(FIRST_TOKENS)
        request = order(decode, turn, targets=[prefill.peer])
        again = await generate(decode, with_holder(request, decode, held))
        usage = again.usage
        assert again.ids == expected.ids
        assert again.held == usage.cached_tokens == held
        # From decode to prefill: the answer, in whole blocks.
        assert usage.prefill_cached_tokens == prefill_had
        assert usage.prefill_pulled_tokens == held - prefill_had
        assert usage.prefill_pulled_bytes == bytes_of(held - prefill_had) <= bytes_of(ANSWER_TOKENS) + bytes_of(BLOCK)
        # Computed: what is new, and at most a block more.
        assert usage.computed_tokens == len(turn) - held <= USER_TOKENS + BLOCK
        assert usage.decode_computed_tokens == 0
        # From prefill to decode: the same tokens.
        assert usage.pulled_tokens == len(turn) - held
        assert usage.pulled_bytes == bytes_of(len(turn) - held) <= bytes_of(USER_TOKENS + BLOCK)
        await at_rest(prefill, decode, alone)


async def test_a_next_turn_that_moves_to_another_decode_replica_pulls_the_conversation_there():
    async with (
        replica("decode", kv_mib=4) as before,
        replica("decode", kv_mib=4, mock_profile=SLOW) as after,
        replica("decode", kv_mib=4) as alone,
    ):
        ids, answer = await first_turn(before, None)
        turn = next_turn(ids, answer)
        expected = await generate(alone, order(alone, turn))
        held = whole(FIRST_TOKENS + ANSWER_TOKENS - 1)
        again = await generate(after, with_holder(order(after, turn), before, held))
        assert again.ids == expected.ids
        assert again.held == 0
        assert again.usage.cached_tokens == 0
        assert again.usage.pulled_tokens == held
        assert again.usage.pulled_bytes == bytes_of(held)
        assert again.usage.computed_tokens == again.usage.decode_computed_tokens == len(turn) - held
        await at_rest(before, after, alone)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
async def test_any_role_is_a_source(role):
    async with replica(role) as source, replica("prefill", mock_profile=SLOW) as prefill, replica("decode") as decode:
        ids = prompt(3, 320)
        if source.role.prefills:
            await generate(decode, order(decode, ids, targets=[source.peer], max_tokens=1))
        else:
            await generate(source, order(source, ids, max_tokens=1))
        await until(lambda: source.bridge.state.leases == 0, "the source is at rest")
        request = with_holder(order(decode, ids, targets=[prefill.peer]), source, 288)
        again = await generate(decode, request)
        assert again.usage.prefill_pulled_tokens == 288
        assert again.usage.computed_tokens == 32
        assert again.usage.pulled_tokens == 320
        await at_rest(source, prefill, decode)


async def test_turns_of_a_real_model_are_right_however_their_kv_travels(tmp_path, monkeypatch):
    # Which side is faster is not the question here, and this model computes in no time.
    monkeypatch.setattr(LoadTimes, "predict", lambda *_: 0.0)
    real = {"engine": "torch", "model": str(make_tiny(tmp_path / "tiny")), "dtype": "float32", "threads": 1}
    async with (
        replica("prefill", **real) as prefill,
        replica("decode", **real) as decode,
        replica("decode", **real) as other,
        replica("both", **real) as alone,
    ):
        ids = prompt(4, 150)
        answer = await generate(decode, order(decode, ids, targets=[prefill.peer], max_tokens=70, **GREEDY))
        turn, held = next_turn(ids, answer), whole(150 + 70 - 1)
        expected = await generate(alone, order(alone, turn, **GREEDY))
        moved = await generate(other, with_holder(order(other, turn, **GREEDY), decode, held))
        remote = await generate(
            decode, with_holder(order(decode, turn, targets=[prefill.peer], **GREEDY), decode, held)
        )
        assert remote.ids == moved.ids == expected.ids
        assert remote.usage.prefill_pulled_tokens == held - whole(150)
        assert remote.usage.computed_tokens == moved.usage.computed_tokens == len(turn) - held
        assert moved.usage.pulled_tokens == held
        await at_rest(prefill, decode, other, alone)
