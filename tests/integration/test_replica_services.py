"""`Prefill` and `KvSource` as their callers see them, and a replica's engine that breaks."""

import asyncio
import random
import time
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from support.replicas import (
    at_rest,
    compose,
    config,
    generate,
    generating,
    keys_of,
    order,
    prompt,
    replica,
    start_request,
)
from support.rpc import CALL_S, until

from kvrelay.engine.protocol import LeasedPage
from kvrelay.errors import Draining, FailedPrecondition, KvrelayError, Mismatch, NotFound, StaleIncarnation, Unavailable
from kvrelay.replica import progress
from kvrelay.replica.process import EXIT_BROKEN
from kvrelay.rpc import convert
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.rpc.lease_convert import lease_from_pb
from kvrelay.rpc.replica_client import KvSourceClient
from kvrelay.types import Peer
from kvrelay.v1 import kv_source_pb2
from kvrelay.v1.kv_source_pb2_grpc import KvSourceStub
from kvrelay.v1.prefill_pb2_grpc import PrefillStub

PULLER = Peer("puller", "p1", "127.0.0.1:1")


@asynccontextmanager
async def channel_to(process):
    channel = open_channel(process.peer.address)
    try:
        yield channel
    finally:
        await channel.close()


async def first_error(call) -> KvrelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


# ---------------------------------------------------------------- Prefill


async def test_prefill_tells_granted_then_ready_then_the_first_token_and_ends_with_the_lease():
    async with replica("prefill") as process, channel_to(process) as channel:
        call = PrefillStub(channel).Start(start_request(process, prompt(1, 600), PULLER), timeout=CALL_S)
        told = []
        async for response in call:
            told.append(response)
            if response.WhichOneof("event") == "first_token":
                break
        kinds = [response.WhichOneof("event") for response in told]
        assert kinds[0] == "granted"
        assert kinds[-1] == "first_token"
        assert set(kinds[1:-1]) == {"ready"}
        assert [response.ready.all for response in told[1:-1]][-1]
        lease = lease_from_pb(told[0].granted.lease)
        assert sum(page.valid_tokens for page in lease.pages) == 600
        assert told[-1].first_token.token.position == 600
        await until(lambda: process.bridge.state.leases == 1, "the lease lives")
        source = KvSourceClient(channel)
        verdict = await source.confirm(
            owner_incarnation=process.incarnation, lease_id=lease.lease_id, pages=lease.pages, timeout_s=CALL_S
        )
        assert verdict == (True, "")
        assert not [response async for response in call]
        await at_rest(process)


async def test_cancelling_prefill_frees_everything_before_and_after_the_first_token():
    async with replica("prefill", mock_profile="prefill_ms_per_token=1") as process, channel_to(process) as channel:
        for last in ("granted", "first_token"):
            call = PrefillStub(channel).Start(start_request(process, prompt(2, 400), PULLER), timeout=CALL_S)
            async for response in call:
                if response.WhichOneof("event") == last:
                    break
            call.cancel()
            await at_rest(process)


async def test_prefill_refuses_callers_that_mean_an_earlier_start():
    async with replica("prefill") as process, channel_to(process) as channel:
        request = start_request(process, prompt(3, 40), PULLER, expected_incarnation="earlier")
        assert isinstance(await first_error(PrefillStub(channel).Start(request, timeout=CALL_S)), StaleIncarnation)


async def test_a_draining_prefill_waits_for_its_pulls_and_takes_no_new_work():
    process = compose(config("prefill"))
    await process.start()
    served = asyncio.create_task(process.serve())
    async with channel_to(process) as channel:
        call = PrefillStub(channel).Start(start_request(process, prompt(4, 100), PULLER), timeout=CALL_S)
        responses = aiter(call)
        granted = lease_from_pb((await anext(responses)).granted.lease)
        process.server.end()
        await until(lambda: process.server.draining, "it drains")
        refused = PrefillStub(channel).Start(start_request(process, prompt(5, 100), PULLER), timeout=CALL_S)
        assert isinstance(await first_error(refused), Draining)
        assert not served.done()
        verdict = await KvSourceClient(channel).confirm(
            owner_incarnation=process.incarnation, lease_id=granted.lease_id, pages=granted.pages, timeout_s=CALL_S
        )
        assert verdict == (True, "")
        async for _ in responses:
            pass
    assert await served == 0


# ---------------------------------------------------------------- KvSource


async def handshake(process, **changes) -> None:
    async with channel_to(process) as channel:
        values = {
            "puller": PULLER,
            "layout": process.bridge.started.agent.layout,
            "identity": process.identity,
            "owner_incarnation": process.incarnation,
            "timeout_s": CALL_S,
        }
        agent = await KvSourceClient(channel).handshake(**(values | changes))
        assert agent == process.bridge.started.agent


async def test_a_handshake_tells_the_owners_memory_and_refuses_what_differs_by_name():
    async with replica("prefill") as process, replica("decode", page_tokens=64) as other:
        await handshake(process)
        with pytest.raises(StaleIncarnation):
            await handshake(process, owner_incarnation="earlier")
        with pytest.raises(Mismatch) as caught:
            await handshake(process, layout=other.bridge.started.agent.layout)
        assert caught.value.field == "page_tokens"
        with pytest.raises(FailedPrecondition):
            await handshake(process, identity=type(process.identity)(**(fields_of(process.identity) | {"model": ""})))


def fields_of(identity) -> dict:
    values = {name: getattr(identity, name) for name in identity.__dataclass_fields__}
    return values | {"model_fingerprint": "other"}


async def test_a_prefix_is_leased_at_once_or_not_at_all():
    ids = prompt(6, 200)
    async with replica("both") as process, channel_to(process) as channel:
        _, keys = keys_of(ids, process)
        request = kv_source_pb2.LeasePrefixRequest(
            puller=convert.peer_to_pb(PULLER),
            owner_incarnation=process.incarnation,
            block_keys=keys,
            skip_blocks=2,
            ttl_s=30,
        )
        stub = KvSourceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.LeasePrefix(request, timeout=CALL_S)
        assert isinstance(from_rpc_error(caught.value), NotFound)
        await generate(process, order(process, ids))
        lease = lease_from_pb((await stub.LeasePrefix(request, timeout=CALL_S)).lease)
        assert lease.first_position == 64
        assert len(lease.pages) == 4
        source = KvSourceClient(channel)
        for _ in range(2):  # releasing twice is no error
            await source.release(owner_incarnation=process.incarnation, lease_ids=[lease.lease_id], timeout_s=CALL_S)
        await at_rest(process)


async def test_leases_of_an_earlier_start_have_ended():
    async with replica("prefill") as process, channel_to(process) as channel:
        source = KvSourceClient(channel)
        page = LeasedPage(0, 1, 32)
        assert await source.confirm(owner_incarnation="earlier", lease_id="a", pages=[page], timeout_s=CALL_S) == (
            False,
            "incarnation",
        )
        assert await source.confirm(
            owner_incarnation=process.incarnation, lease_id="a", pages=[page], timeout_s=CALL_S
        ) == (False, "unknown_lease")
        for incarnation in ("earlier", process.incarnation):
            ended = await source.extend(owner_incarnation=incarnation, lease_ids=["a", "b"], ttl_s=9, timeout_s=CALL_S)
            assert ended == ("a", "b")
            await source.release(owner_incarnation=incarnation, lease_ids=["a"], timeout_s=CALL_S)


# ---------------------------------------------------------------- engines that break, and many cancels


async def test_when_the_engine_dies_running_calls_fail_and_the_process_exits(monkeypatch):
    process = compose(config("both", mock_profile="step_ms=20"))
    await process.start()
    served = asyncio.create_task(process.serve())
    async with generating(process, order(process, prompt(7, 40), max_tokens=2000)) as call:
        await anext(aiter(call))

        def broken(_batch):
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr("kvrelay.engine.mock.MockRunner.run", lambda _self, batch: broken(batch))
        assert isinstance(await first_error(call), KvrelayError)
        for seed in range(3):  # an engine whose steps keep failing gives up
            with suppress(grpc.aio.AioRpcError):
                await generate(process, order(process, prompt(seed, 40)))
    assert await served == EXIT_BROKEN
    assert not process.bridge.healthy


async def test_a_wedged_engine_is_not_healthy_until_it_moves_again(monkeypatch):
    monkeypatch.setattr(progress, "STALL_AFTER_S", 0.3)
    monkeypatch.setattr(progress, "PROBE_INTERVAL_S", 0.05)
    async with replica("both") as process:
        for _ in range(10):
            await asyncio.sleep(0.05)  # idle for longer than an engine may be silent
            assert process.server.health.healthy()
        stuck = [True]

        def wait_while_stuck(_runner, _batch) -> float:
            while stuck:
                time.sleep(0.01)
            return 0.0

        monkeypatch.setattr("kvrelay.engine.mock.MockRunner._step_s", wait_while_stuck)
        asked = asyncio.create_task(generate(process, order(process, prompt(8, 40))))
        await until(lambda: not process.server.health.healthy("kvrelay.v1.Decode"), "it is seen")
        assert not process.server.health.healthy()
        stuck.clear()
        assert len((await asked).ids) == 16
        await until(process.server.health.healthy, "it is well again")


async def test_an_engine_in_a_process_of_its_own_serves_and_its_death_is_noticed():
    async with replica("both", engine_side="process") as process:
        assert len((await generate(process, order(process, prompt(9, 100)))).ids) == 16
        process.bridge._side._process.kill()
        await until(lambda: not process.bridge.healthy, "its death is noticed")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(process, order(process, prompt(9, 100)))
        assert isinstance(from_rpc_error(caught.value), Unavailable)


async def test_random_cancels_bring_everything_back():
    rng = random.Random(0)
    async with (
        replica("decode", mock_profile="step_ms=2") as decode,
        replica("prefill", mock_profile="prefill_ms_per_token=0.2,step_ms=1") as prefill,
    ):

        async def cancelled(seed: int) -> None:
            request = order(decode, prompt(seed, rng.randrange(1, 400)), targets=[prefill.peer], max_tokens=50)
            async with generating(decode, request) as call:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rng.random() * 0.2):
                        async for _ in call:
                            pass

        for burst in range(8):
            await asyncio.gather(*(cancelled(100 * burst + each) for each in range(12)))
        await at_rest(prefill, decode)
        assert len((await generate(decode, order(decode, prompt(999, 200), targets=[prefill.peer]))).ids) == 16
