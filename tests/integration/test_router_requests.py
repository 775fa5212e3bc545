"""One router between real clients and decode replicas that fail as they are told."""

import asyncio
from collections import deque

import grpc
import pytest
from support.decoders import CONTEXT_TOKENS, FakeFleet, FakeReplica, Plan, fake_fleet, text_from
from support.registry import MODEL, until_done

from kvrelay.client import AsyncClient
from kvrelay.client.values import Decision, Delta, Finish, Part
from kvrelay.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidArgument,
    PeerLost,
    ResourceExhausted,
    StaleIncarnation,
    Unavailable,
)
from kvrelay.rpc import convert
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.types import FinishReason, Peer, Role, pack_ids, unpack_ids
from kvrelay.v1 import common_pb2, router_pb2
from kvrelay.v1 import decode_pb2 as pb
from kvrelay.v1.router_pb2_grpc import RouterStub
from router.worker import Router

CALL_S = 30.0
PROMPT = "x" * 40
TOKENS = 20
WHOLE = text_from(len(PROMPT), TOKENS)


@pytest.fixture
async def fleet(valkey_url):
    async with fake_fleet(valkey_url) as made:
        yield made


async def two_decoders(fleet: FakeFleet, **config) -> tuple[Router, AsyncClient, list[FakeReplica]]:
    decoders = [await fleet.replica("d1"), await fleet.replica("d2")]
    router, client = await fleet.router(**config)
    await until_done(lambda: len(list(router.core.fleet.members())) == 2, "both replicas are known")
    return router, client, decoders


async def ask(client: AsyncClient, **options) -> list[Part]:
    async with client.stream_generate(PROMPT, max_tokens=TOKENS, deadline_s=CALL_S, **options) as stream:
        return [part async for part in stream]


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Delta))


def decisions(parts: list[Part]) -> list[Decision]:
    return [part for part in parts if isinstance(part, Decision)]


def plan_first(decoders: list[FakeReplica], plan: Plan) -> None:
    """Have the first attempt go by the plan, wherever it lands."""
    plans = deque([plan])
    for each in decoders:
        each.decode.plans = plans


def requests_of(decoders: list[FakeReplica]) -> list[pb.DecodeGenerateRequest]:
    return sorted((r for each in decoders for r in each.decode.requests), key=lambda r: r.attempt)


def nothing_booked(router: Router) -> bool:
    return len(router.core.fleet.bookings) == 0 and router.core.serving == 0


# ---------------------------------------------------------------- the answer


async def test_the_decision_comes_first_the_text_next_and_the_finish_last(fleet):
    decode, prefill = await fleet.replica("d1"), await fleet.replica("p1", Role.PREFILL)
    router, client = await fleet.router(disaggregate="always")
    await until_done(lambda: len(list(router.core.fleet.members())) == 2, "both replicas are known")
    first, *deltas, last = await ask(client, request_id="mine", seed=7)
    assert isinstance(first, Decision)
    assert (first.decode, first.prefill) == (decode.peer, prefill.peer)
    assert (first.request_id, first.seed, first.model) == ("mine", 7, MODEL)
    assert (first.reason, first.decider_reason, first.policy) == ("cold", "always", "prefix_aware")
    assert first.inputs["compute_s"] > 0
    assert text_of(deltas) == WHOLE
    assert isinstance(last, Finish)
    assert (last.reason, last.attempts, last.usage.output_tokens) == (FinishReason.LENGTH, 1, TOKENS)
    assert last.usage.prompt_tokens == len(PROMPT)
    assert last.ttft_s > 0
    sent = decode.decode.requests[0]
    assert [target.peer.replica_id for target in sent.prefill_targets] == ["p1"]
    assert sent.expected_incarnation == "i1"
    assert (sent.sampling.seed, sent.never_local) == (7, False)
    assert len(sent.block_keys) == 16
    assert nothing_booked(router)


async def test_a_chat_is_rendered_and_a_seed_drawn(fleet):
    replica = await fleet.replica("d1")
    _, client = await fleet.router()
    answer = await client.chat("hi", max_tokens=4)
    tokens = await client.tokenize("hi")
    assert tuple(unpack_ids(replica.decode.requests[0].prompt_ids)) == tokens.ids
    assert answer.decision.seed == replica.decode.requests[0].sampling.seed
    assert answer.decision.seed != (await client.chat("hi", max_tokens=4)).decision.seed


async def test_token_ids_are_told_when_they_are_asked_for(fleet):
    await fleet.replica("d1")
    _, client = await fleet.router()
    answer = await client.generate(PROMPT, max_tokens=TOKENS, return_ids=True)
    assert answer.text == WHOLE
    assert len(answer.ids) == TOKENS


async def test_a_stop_string_ends_the_answer_before_it_and_the_decode_stream_with_it(fleet):
    replica = await fleet.replica("d1")
    replica.decode.plans.append(Plan(hang_after=TOKENS - 5))
    router, client = await fleet.router()
    stop = WHOLE[6:9]
    parts = await ask(client, stop_strings=(stop,))
    finish = parts[-1]
    assert text_of(parts) == WHOLE[:6]
    assert (finish.reason, finish.stop_string, finish.usage.output_tokens) == (FinishReason.STOP, stop, 9)
    assert list(replica.decode.requests[0].sampling.stop_strings) == []
    await until_done(lambda: replica.decode.running == 0, "the decode stream is cancelled")
    assert nothing_booked(router)


async def test_an_answer_that_fills_the_context_says_so(fleet):
    await fleet.replica("d1")
    _, client = await fleet.router()
    prompt = [1] * (CONTEXT_TOKENS - 8)
    assert (await client.generate(prompt)).finish.reason is FinishReason.CONTEXT
    assert (await client.generate(prompt, max_tokens=8)).finish.reason is FinishReason.LENGTH
    assert (await client.generate(prompt, max_tokens=9)).finish.reason is FinishReason.CONTEXT


# ---------------------------------------------------------------- survival

LOST = [
    Plan(fail_after=7, error=PeerLost("the machine is gone")),
    Plan(fail_after=7),
    Plan(fail_after=0, error=Draining("shutting down")),
    Plan(fail_after=3, error=StaleIncarnation("restarted")),
    Plan(fail_after=0, error=ResourceExhausted("full")),
    Plan(skip_after=5),
    Plan(attempt=9),
    Plan(fail_after=TOKENS - 4, error=PeerLost("gone"), span=4, repeat=True),
]


@pytest.mark.parametrize("plan", LOST, ids=range(len(LOST)))
async def test_a_failed_attempt_goes_on_elsewhere_with_every_token_once(fleet, plan):
    router, client, decoders = await two_decoders(fleet)
    plan_first(decoders, plan)
    parts = await ask(client)
    assert text_of(parts) == WHOLE
    one, two = decisions(parts)
    assert (one.attempt, two.attempt, parts[-1].attempts) == (0, 1, 2)
    assert one.decode != two.decode, "the replica that has just failed is avoided"
    before = b""
    for number, request in enumerate(requests_of(decoders)):
        assert request.attempt == number
        assert request.output_ids.startswith(before)
        before = request.output_ids
        blocks = (len(request.prompt_ids) + len(request.output_ids)) // 4 // 32
        assert len(request.block_keys) == 16 * blocks
    await until_done(lambda: nothing_booked(router), "everything booked is given back")


async def test_tokens_told_twice_and_in_pieces_come_out_once(fleet):
    replica = await fleet.replica("d1")
    replica.decode.plans.append(Plan(span=3, repeat=True))
    _, client = await fleet.router()
    parts = await ask(client)
    assert text_of(parts) == WHOLE
    assert parts[-1].attempts == 1


async def test_a_stream_that_breaks_after_the_last_token_needs_no_other_attempt(fleet):
    replica = await fleet.replica("d1")
    replica.decode.plans.append(Plan(end_early=True))
    _, client = await fleet.router()
    parts = await ask(client)
    assert (text_of(parts), parts[-1].attempts, parts[-1].reason) == (WHOLE, 1, FinishReason.LENGTH)
    assert len(replica.decode.requests) == 1


async def test_a_lone_replica_that_lost_a_connection_is_tried_again(fleet):
    replica = await fleet.replica("d1")
    replica.decode.plans.append(Plan(fail_after=4, error=PeerLost("a slip of the network")))
    _, client = await fleet.router()
    assert text_of(await ask(client)) == WHOLE


async def test_a_killed_replica_s_streams_go_on_elsewhere(fleet):
    router, client, decoders = await two_decoders(fleet)
    for each in decoders:
        each.decode.plans.append(Plan(hang_after=5))
    asked = [asyncio.create_task(ask(client)) for _ in range(1)]
    await until_done(lambda: any(each.decode.requests for each in decoders), "the first attempt is under way")
    dying = next(each for each in decoders if each.decode.requests)
    other = next(each for each in decoders if each is not dying)
    other.decode.plans.clear()
    await dying.kill()
    parts = (await asyncio.gather(*asked))[0]
    assert text_of(parts) == WHOLE
    assert parts[-1].attempts == 2
    assert nothing_booked(router)


@pytest.mark.parametrize("how", ["replaced", "stalled"])
async def test_streams_of_a_replica_that_the_directory_gives_up_move_at_once(fleet, how):
    router, client, decoders = await two_decoders(fleet)
    for each in decoders:
        each.decode.plans.append(Plan(hang_after=5))
    asked = asyncio.create_task(ask(client))
    await until_done(lambda: any(each.decode.requests for each in decoders), "the first attempt is under way")
    hanging = next(each for each in decoders if each.decode.requests)
    other = next(each for each in decoders if each is not hanging)
    other.decode.plans.clear()
    if how == "replaced":
        await fleet.replica(hanging.peer.replica_id, incarnation="i2")
    else:
        await hanging.member.beat(ready=False)
    parts = await asked
    assert text_of(parts) == WHOLE
    assert parts[-1].attempts == 2
    await until_done(lambda: hanging.decode.running == 0, "the hanging stream is cancelled")
    assert nothing_booked(router)


async def test_attempts_are_bounded(fleet):
    replica = await fleet.replica("d1")
    for _ in range(9):
        replica.decode.plans.append(Plan(fail_after=0, error=PeerLost("always")))
    other = await fleet.replica("d2")
    for _ in range(9):
        other.decode.plans.append(Plan(fail_after=0, error=PeerLost("always")))
    router, client = await fleet.router()
    with pytest.raises(Unavailable):
        await ask(client)
    assert len(replica.decode.requests) + len(other.decode.requests) == 4
    assert nothing_booked(router)


@pytest.mark.parametrize("error", [InvalidArgument("prompt_ids", "refused"), InternalError("broken")])
async def test_what_another_replica_would_refuse_too_is_told_at_once(fleet, error):
    router, client, decoders = await two_decoders(fleet)
    plan_first(decoders, Plan(fail_after=0, error=error))
    with pytest.raises(type(error)):
        await ask(client)
    assert len(requests_of(decoders)) == 1
    assert nothing_booked(router)


# ---------------------------------------------------------------- the prefill leg


def leg(state: pb.PrefillLeg.State.ValueType, peer=None, reason: str = "") -> pb.PrefillLeg:
    return pb.PrefillLeg(state=state, peer=None if peer is None else convert.peer_to_pb(peer), reason=reason)


async def test_booked_prefill_work_follows_the_leg_and_the_finish_tells_who_did_it(fleet):
    decode, first = await fleet.replica("d1"), await fleet.replica("p1", Role.PREFILL)
    other = Peer("p2", "i1", "127.0.0.1:1")  # an alternate that has come since
    router, client = await fleet.router(disaggregate="always")
    await until_done(lambda: len(list(router.core.fleet.members())) == 2, "all replicas are known")
    load = router.core.fleet.bookings.load
    failed = leg(pb.PrefillLeg.STATE_FAILED, first.peer, "timeout")
    moved = leg(pb.PrefillLeg.STATE_STARTED, other)

    decode.decode.plans.append(Plan(legs=(failed, moved), hang_after=0))
    hanging = asyncio.create_task(ask(client))
    await until_done(lambda: load(other).prefill_s > 0, "the leg has moved")
    assert load(first.peer).prefill_s == 0
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    await until_done(lambda: nothing_booked(router), "everything booked is given back")

    decode.decode.plans.append(Plan(legs=(failed, moved, leg(pb.PrefillLeg.STATE_READY, other))))
    finish = (await ask(client))[-1]
    assert (finish.prefill, finish.prefill_reason) == (other, "timeout")

    decode.decode.plans.append(Plan(legs=(failed, leg(pb.PrefillLeg.STATE_LOCAL, None, "unreachable"))))
    finish = (await ask(client))[-1]
    assert (finish.prefill, finish.prefill_reason) == (None, "unreachable")


# ---------------------------------------------------------------- cancellation, deadlines, bounds


async def test_a_client_that_goes_away_ends_everything(fleet):
    replica = await fleet.replica("d1")
    replica.decode.plans.append(Plan(hang_after=5))
    router, client = await fleet.router()
    task = asyncio.create_task(ask(client))
    await until_done(lambda: replica.decode.requests, "the request is under way")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_done(lambda: replica.decode.running == 0 and nothing_booked(router), "everything has ended")


async def test_the_clients_deadline_is_the_attempts_deadline(fleet):
    replica = await fleet.replica("d1")
    replica.decode.plans.append(Plan(hang_after=5))
    router, client = await fleet.router()
    with pytest.raises(DeadlineExceeded):
        await client.generate(PROMPT, max_tokens=TOKENS, deadline_s=1.0)
    await until_done(lambda: replica.decode.running == 0 and nothing_booked(router), "everything has ended")
    assert len(replica.decode.requests) == 1


async def test_a_full_router_turns_requests_away_with_a_hint(fleet):
    replica = await fleet.replica("d1")
    replica.decode.plans.append(Plan(hang_after=5))
    router, client = await fleet.router(queue_requests=1)
    task = asyncio.create_task(ask(client))
    await until_done(lambda: replica.decode.requests, "the request is under way")
    with pytest.raises(ResourceExhausted) as caught:
        await ask(client)
    assert caught.value.retry_after_s > 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_done(lambda: nothing_booked(router), "the request has ended")
    assert text_of(await ask(client)) == WHOLE


async def test_full_replicas_are_told_as_overload(fleet):
    _, client, decoders = await two_decoders(fleet)
    for each in decoders:
        each.decode.plans.append(Plan(fail_after=0, error=ResourceExhausted("full", retry_after_s=2.0)))
    with pytest.raises(ResourceExhausted) as caught:
        await ask(client)
    assert caught.value.retry_after_s == 2.0
    assert len(requests_of(decoders)) == 2


async def test_without_replicas_a_request_is_unavailable_at_once(fleet):
    _, client = await fleet.router()
    with pytest.raises(Unavailable, match="no replica of this model"):
        await ask(client)
    await fleet.replica("p1", Role.PREFILL)
    await fleet.replica("d1", draining=True)
    with pytest.raises(Unavailable):
        await ask(client)


async def test_an_answer_that_another_router_began_is_continued(fleet):
    replica = await fleet.replica("d1")
    router, client = await fleet.router()
    whole = await client.generate(PROMPT, max_tokens=TOKENS, return_ids=True)
    channel = open_channel(router.server.address)
    request = router_pb2.GenerateRequest(
        text=PROMPT,
        sampling=common_pb2.Sampling(max_tokens=TOKENS),
        continuation=router_pb2.Continuation(
            request_id="broken", output_ids=pack_ids(whole.ids[:8]), seed=42, attempt=2
        ),
    )
    parts = [part async for part in RouterStub(channel).Generate(request, timeout=CALL_S)]
    await channel.close()
    assert (parts[0].decision.request_id, parts[0].decision.attempt, parts[0].decision.seed) == ("broken", 2, 42)
    assert "".join(part.delta.text for part in parts) == WHOLE[8:]
    assert parts[-1].finish.usage.output_tokens == TOKENS
    assert replica.decode.requests[-1].output_ids == pack_ids(whole.ids[:8])


# ---------------------------------------------------------------- bad input

BAD = {
    "text": {"text": ""},
    "prompt": {},
    "prompt_ids": {"prompt_ids": pack_ids([1, 2, 512])},
    "chat.messages": {"chat": router_pb2.Chat()},
    "model": {"text": "x", "model": "other"},
    "sampling.temperature": {"text": "x", "sampling": common_pb2.Sampling(temperature=float("nan"))},
    "sampling.stop_ids": {"text": "x", "sampling": common_pb2.Sampling(stop_ids=pack_ids([512]))},
    "sampling.max_tokens": {"text": "x", "sampling": common_pb2.Sampling(max_tokens=0)},
    "sampling.n": {"text": "x", "sampling": common_pb2.Sampling(n=2)},
    "priority": {"text": "x", "priority": 101},
    "adapter": {"text": "x", "adapter": "lora"},
    "slo.ttft_ms": {"text": "x", "slo": common_pb2.Slo(ttft_ms=float("nan"))},
    "request_id": {"text": "x", "request_id": "a\nb"},
    "continuation.request_id": {"text": "x", "continuation": router_pb2.Continuation()},
}


async def test_bad_input_is_refused_with_the_field_and_the_limit(fleet):
    replica = await fleet.replica("d1")
    router, _ = await fleet.router()
    channel = open_channel(router.server.address)
    stub = RouterStub(channel)
    cases = BAD | {"prompt ": {"prompt_ids": pack_ids([1] * CONTEXT_TOKENS)}}
    for field, fields in cases.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(router_pb2.GenerateRequest(**fields), timeout=CALL_S).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, field
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == field.strip(), error
        assert error.description
    assert f"at most {CONTEXT_TOKENS - 1}" in error.description
    await channel.close()
    assert replica.decode.requests == []
    assert nothing_booked(router)
