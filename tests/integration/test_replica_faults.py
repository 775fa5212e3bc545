"""Prefill replicas that die, restart, refuse or stall: the answer stays the same and nothing is left behind."""

import asyncio

import grpc
import pytest
from support.replicas import (
    BLOCK_TOKENS,
    Answer,
    at_rest,
    generate,
    generating,
    order,
    prompt,
    replica,
    start_request,
)
from support.rpc import CALL_S, until

from decode_svc import leg
from kvrelay.engine import loop
from kvrelay.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvrelay.kv.faults import Fault, FaultyTransfer, Plan, listed
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.types import Peer
from kvrelay.v1 import decode_pb2
from kvrelay.v1.prefill_pb2_grpc import PrefillStub

SLOW = "prefill_ms_per_token=2"
PACED = "step_ms=20"


@pytest.fixture
def faulty(monkeypatch):
    """Have the reads of the replica named "decode" follow a plan; returns the list its transfer comes into."""
    made: list[FaultyTransfer] = []
    real = loop.make_transfer

    def plan_reads(plan: Plan) -> list[FaultyTransfer]:
        def make(agent_name: str):
            transfer = real(agent_name)
            if not agent_name.startswith("decode-"):
                return transfer
            made.append(FaultyTransfer(transfer, plan))
            return made[-1]

        monkeypatch.setattr(loop, "make_transfer", make)
        return made

    return plan_reads


async def local_answer(ids: list[int], **fields) -> list[int]:
    async with replica("decode", replica_id="alone") as alone:
        return (await generate(alone, order(alone, ids, **fields))).ids


async def test_prefill_that_is_gone_before_the_request():
    ids = prompt(1, 200)
    async with replica("decode") as decode:
        async with replica("prefill") as prefill:
            gone = prefill.peer
        answer = await generate(decode, order(decode, ids, targets=[gone]))
        assert answer.ids == await local_answer(ids)
        assert answer.legs == [("started", ""), ("failed", "unreachable"), ("local", "unreachable")]
        assert answer.usage.decode_computed_tokens == 200
        await at_rest(decode)


async def test_prefill_that_dies_while_it_reads_the_prompt():
    ids = prompt(2, 400)
    async with replica("decode") as decode, replica("prefill", mock_profile=SLOW) as prefill:
        asked = asyncio.create_task(generate(decode, order(decode, ids, targets=[prefill.peer])))
        await until(lambda: prefill.bridge.state.running, "the prompt is being read")
        await prefill.server.stop(0)
        answer = await asked
        assert answer.ids == await local_answer(ids)
        assert answer.legs[-2:] == [("failed", "unreachable"), ("local", "unreachable")]
        await at_rest(decode)


async def test_a_pull_that_fails_goes_to_the_next_target_and_keeps_what_was_passed_on(faulty):
    ids = prompt(3, 200)
    faulty(listed({0: Fault(fails=True)}))
    async with (
        replica("decode", replica_id="decode") as decode,
        replica("prefill") as first,
        replica("prefill") as second,
    ):
        answer = await generate(decode, order(decode, ids, targets=[first.peer, second.peer]))
        assert answer.ids == await local_answer(ids)
        assert answer.positions == list(range(200, 216))
        assert [state for state, _ in answer.legs] == ["started", "ready", "failed", "started", "ready", "pulled"]
        assert answer.usage.pulled_tokens == 200
        await at_rest(decode, first, second)


async def test_a_failed_pull_without_alternates_is_made_up_for_locally(faulty):
    ids = prompt(4, 200)
    faulty(listed({0: Fault(fails=True)}))
    async with replica("decode", replica_id="decode") as decode, replica("prefill") as prefill:
        answer = await generate(decode, order(decode, ids, targets=[prefill.peer]))
        assert answer.ids == await local_answer(ids)
        assert answer.positions == list(range(200, 216))
        assert answer.legs[-2:] == [("failed", "injected"), ("local", "injected")]
        await at_rest(decode, prefill)
        # One failure does not disable a peer.
        after = await generate(decode, order(decode, prompt(5, 200), targets=[prefill.peer]))
        assert after.legs[-1] == ("pulled", "")


async def test_decode_holds_no_room_for_a_lost_lease_while_the_next_replica_is_asked(faulty):
    ids = prompt(8, 200)
    transfers = faulty(listed({0: Fault(hold=True)}))
    async with (
        replica("decode", replica_id="decode") as decode,
        replica("prefill") as first,
        # Its stock takes one lease at a time.
        replica("prefill", stock_share=0.01) as busy,
        open_channel(busy.peer.address) as channel,
    ):
        stock = PrefillStub(channel).Start(start_request(busy, prompt(9, 200), decode.peer), timeout=CALL_S)
        await until(lambda: busy.bridge.state.leases, "the stock is full")
        asked = asyncio.create_task(generate(decode, order(decode, ids, targets=[first.peer, busy.peer])))
        await until(lambda: transfers[0].reads, "the pull is under way")
        await first.server.stop(0)
        await until(lambda: busy.bridge.state.waiting, "the next one is asked")
        transfers[0].let_go([0])
        bridge = decode.bridge
        await until(lambda: bridge.state.pages_free == bridge.state.pages_total, "the room is given back")
        stock.cancel()
        answer = await asked
        assert answer.ids == await local_answer(ids)
        assert answer.legs[-1] == ("pulled", "")
        await at_rest(decode, busy)


async def test_prefill_that_dies_after_the_pull_and_before_the_verdict(monkeypatch):
    ids = prompt(6, 200)
    async with replica("decode") as decode, replica("prefill") as prefill:
        stops: list[asyncio.Task[None]] = []

        async def die(*_args, **_options):
            stops.append(asyncio.create_task(prefill.server.stop(0)))
            raise Unavailable("dying")

        monkeypatch.setattr(prefill.bridge.leases, "confirm", die)
        answer = await generate(decode, order(decode, ids, targets=[prefill.peer]))
        await asyncio.gather(*stops)
        assert answer.ids == await local_answer(ids)
        assert answer.positions == list(range(200, 216))
        assert answer.legs[-2:] == [("failed", "unconfirmed"), ("local", "unconfirmed")]
        await at_rest(decode)


async def test_a_declined_pull_is_not_used(monkeypatch):
    ids = prompt(7, 200)
    async with replica("decode") as decode, replica("prefill") as prefill:
        real = prefill.bridge.leases.confirm

        async def other_generation(lease_id, pages, *, timeout_s):
            wrong = tuple(type(page)(page.page, page.generation + 1, page.valid_tokens) for page in pages)
            return await real(lease_id, wrong, timeout_s=timeout_s)

        monkeypatch.setattr(prefill.bridge.leases, "confirm", other_generation)
        answer = await generate(decode, order(decode, ids, targets=[prefill.peer]))
        assert answer.ids == await local_answer(ids)
        assert ("failed", "generation") in answer.legs
        await at_rest(decode, prefill)


@pytest.mark.parametrize("same_port", [True, False])
async def test_a_restarted_prefill_is_used_again_without_restarting_decode(same_port):
    async with replica("decode") as decode:
        async with replica("prefill", replica_id="prefill") as first:
            old = first.peer
            before = await generate(decode, order(decode, prompt(8, 200), targets=[old]))
        lost = await generate(decode, order(decode, prompt(9, 200), targets=[old]))
        port = int(old.address.rpartition(":")[2]) if same_port else 0
        async with replica("prefill", replica_id="prefill", port=port) as second:
            again = await generate(decode, order(decode, prompt(10, 200), targets=[second.peer]))
            stale = Peer("prefill", old.incarnation, second.peer.address)
            refused = await generate(decode, order(decode, prompt(11, 200), targets=[stale]))
        assert before.legs[-1] == again.legs[-1] == ("pulled", "")
        assert lost.legs[-1] == ("local", "unreachable")
        assert refused.legs[-1] == ("local", "restarted")


async def test_without_permission_to_read_locally_lost_targets_are_unavailable():
    async with replica("decode") as decode:
        async with replica("prefill") as prefill:
            gone = prefill.peer
        with pytest.raises(Unavailable, match="unreachable"):
            await outcome(decode, order(decode, prompt(12, 200), targets=[gone, gone], never_local=True))
        await at_rest(decode)


async def outcome(process, request: decode_pb2.DecodeGenerateRequest, timeout_s: float = CALL_S) -> Answer:
    """Generate; raise what the call failed with, as clients see it."""
    try:
        return await generate(process, request, timeout_s)
    except Exception as error:
        raise from_rpc_error(error) from error


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt_ids", {"prompt_ids": b"", "block_keys": b""}),
        ("prompt_ids", {"prompt_ids": b"\xff" * 4, "block_keys": b""}),
        ("block_keys", {"block_keys": b"x" * 16}),
        ("root_key", {"root_key": b"x"}),
        ("forced_next", {"forced_next": 10_000}),
    ],
)
async def test_bad_input_reaches_the_caller_naming_the_field(field, change):
    async with replica("decode") as decode, replica("prefill") as prefill:
        request = order(decode, prompt(13, 8), targets=[prefill.peer])
        for name, value in change.items():
            setattr(request, name, value)
        with pytest.raises(InvalidArgument) as caught:
            await outcome(decode, request)
        assert caught.value.field == field
        await at_rest(decode, prefill)


async def test_what_prefill_refuses_reaches_the_caller_and_nothing_is_decoded():
    # A pool of 1 MiB holds 2^20 / 1024 tokens of the prefill replica, and more of the decode replica.
    heavy = "kv_bytes_per_token=1024"
    async with (
        replica("decode", mock_profile=heavy, kv_mib=4) as decode,
        replica("prefill", mock_profile=heavy) as prefill,
    ):
        with pytest.raises(InvalidArgument) as caught:
            await outcome(decode, order(decode, prompt(14, 2048), targets=[prefill.peer]))
        assert caught.value.field == "prompt_ids"
        await at_rest(decode, prefill)


async def test_replicas_of_another_layout_are_passed_over():
    ids = prompt(15, 200)
    async with replica("decode") as decode, replica("prefill", page_tokens=2 * BLOCK_TOKENS) as other:
        answer = await generate(decode, order(decode, ids, targets=[other.peer]))
        assert answer.ids == await local_answer(ids)
        assert answer.legs[-1] == ("local", "mismatch")
        await at_rest(decode, other)


async def test_a_silent_prefill_is_given_up(monkeypatch):
    monkeypatch.setattr(leg, "PREFILL_SILENCE_S", 0.3)
    ids = prompt(16, 200)
    async with replica("decode") as decode, replica("prefill", mock_profile="step_ms=2000") as prefill:
        answer = await generate(decode, order(decode, ids, targets=[prefill.peer]))
        assert answer.ids == await local_answer(ids)
        assert answer.legs[-1] == ("local", "timeout")
        await at_rest(decode, prefill)


async def test_a_token_sent_by_an_earlier_attempt_is_forced_and_not_told_again():
    ids = prompt(17, 100)
    whole = await local_answer(ids)
    async with replica("decode") as decode, replica("prefill") as prefill:
        request = order(decode, ids, targets=[prefill.peer], output=whole[:4], forced_next=whole[4], attempt=1)
        answer = await generate(decode, request)
        assert answer.ids == whole[5:]
        assert answer.positions[0] == 105
        assert answer.legs[-1] == ("pulled", "")


async def test_a_forced_token_that_completes_the_answer_ends_it_at_once():
    ids = prompt(18, 100)
    whole = await local_answer(ids)
    async with replica("decode") as decode, replica("prefill") as prefill:
        request = order(decode, ids, targets=[prefill.peer], output=whole[:15], forced_next=whole[15], attempt=1)
        answer = await generate(decode, request)
        assert answer.ids == []
        assert answer.usage.output_tokens == 16
        await at_rest(decode, prefill)


async def test_a_lease_is_extended_while_decode_has_no_room():
    async with (
        replica("decode", mock_profile=PACED, max_sequences=1, lease_ttl_s=0.5) as decode,
        replica("prefill") as prefill,
    ):
        async with generating(decode, order(decode, prompt(19, 40), max_tokens=100)) as busy:
            await until(lambda: decode.bridge.state.running, "decode is busy")
            waiting = asyncio.create_task(generate(decode, order(decode, prompt(20, 200), targets=[prefill.peer])))
            async for _ in busy:
                pass
        answer = await waiting
        assert answer.legs[-1] == ("pulled", "")
        await at_rest(decode, prefill)


async def test_a_request_that_decode_gives_up_before_admission_frees_prefill_at_once():
    async with (
        replica("decode", mock_profile=PACED, max_sequences=1) as decode,
        replica("prefill") as prefill,
        generating(decode, order(decode, prompt(21, 40), max_tokens=1000)),
    ):
        await until(lambda: decode.bridge.state.running, "decode is busy")
        with pytest.raises(DeadlineExceeded):
            await outcome(decode, order(decode, prompt(22, 200), targets=[prefill.peer]), timeout_s=0.5)
        await at_rest(prefill)


async def cancelled_when(condition, what: str, decode, request) -> None:
    async with generating(decode, request) as call:
        reader = asyncio.create_task(read_all(call))
        await until(condition, what)
        call.cancel()
        await reader


async def read_all(call) -> None:
    try:
        async for _ in call:
            pass
    except asyncio.CancelledError:
        assert call.cancelled()


async def test_cancelling_in_any_phase_leaves_nothing_behind(faulty):
    transfers = faulty(listed({0: Fault(hold=True)}))
    async with (
        replica("decode", replica_id="decode", mock_profile=PACED) as decode,
        replica("prefill", mock_profile=SLOW) as prefill,
    ):
        pulling = order(decode, prompt(31, 100), targets=[prefill.peer])
        await cancelled_when(lambda: transfers[0].reads, "the pull is under way", decode, pulling)
        await at_rest(prefill)
        await until(lambda: decode.bridge.state.pages_quarantined, "its pages are in quarantine")
        transfers[0].let_go([0])
        await at_rest(decode)
        reading = order(decode, prompt(30, 600), targets=[prefill.peer])
        await cancelled_when(lambda: prefill.bridge.state.running, "the prompt is being read", decode, reading)
        await at_rest(prefill, decode)
        writing = order(decode, prompt(32, 100), targets=[prefill.peer], max_tokens=2000)
        await cancelled_when(lambda: decode.bridge.state.decode_tokens > 100, "the answer is written", decode, writing)
        await at_rest(prefill, decode)


async def test_a_decode_replica_that_dies_takes_its_leases_with_it(faulty):
    transfers = faulty(listed({0: Fault(hold=True)}))
    async with replica("prefill") as prefill:
        async with (
            replica("decode", replica_id="decode") as decode,
            generating(decode, order(decode, prompt(40, 200), targets=[prefill.peer])) as call,
        ):
            reader = asyncio.create_task(outcome_of(call))
            await until(lambda: transfers[0].reads, "the pull is under way")
            assert prefill.bridge.state.leases
            await decode.server.stop(0)
            await decode.channels.close()
            await until(lambda: not prefill.bridge.state.leases, "its lease is gone")
            await reader
        await at_rest(prefill)


async def outcome_of(call) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await read_all(call)
