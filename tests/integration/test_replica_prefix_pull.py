"""A prefix that another replica holds: loaded when that pays, computed otherwise and whenever anything fails."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from support.holders import bytes_of, with_holder
from support.replicas import Answer, at_rest, generate, generating, order, prompt, replica
from support.rpc import until

from kvrelay.engine import loop
from kvrelay.kv.faults import Fault, FaultyTransfer, listed
from kvrelay.replica import prefix_pull
from kvrelay.replica.process import ReplicaProcess
from kvrelay.types import Peer

TOKENS = 320
HELD = 288
SLOW = "prefill_ms_per_token=1"
"""Computing the prefix takes 0.3 s: whatever works on this machine loads it faster."""


@pytest.fixture
def faulty(monkeypatch):
    """Have the reads of the replica named "reader" follow a plan; returns the list its transfer comes into."""
    made: list[FaultyTransfer] = []
    real = loop.make_transfer

    def plan_reads(fault: Fault) -> list[FaultyTransfer]:
        def make(agent_name: str):
            transfer = real(agent_name)
            if not agent_name.startswith("reader-"):
                return transfer
            made.append(FaultyTransfer(transfer, listed({0: fault})))
            return made[-1]

        monkeypatch.setattr(loop, "make_transfer", make)
        return made

    return plan_reads


@asynccontextmanager
async def two_replicas(seed: int, **reader: object) -> AsyncIterator[tuple[list[int], ReplicaProcess, ReplicaProcess]]:
    """A prompt, a decode replica that holds it, and one that is to read it."""
    ids = prompt(seed, TOKENS)
    given = {"replica_id": "reader", "mock_profile": SLOW} | reader
    async with replica("decode") as holder, replica("decode", **given) as reader_:
        await generate(holder, order(holder, ids, max_tokens=1))
        yield ids, holder, reader_
        await at_rest(reader_)
        if holder.bridge.healthy:
            await at_rest(holder)


async def alone(ids: list[int]) -> list[int]:
    async with replica("decode", replica_id="alone") as process:
        return (await generate(process, order(process, ids))).ids


def assert_computed(answer: Answer) -> None:
    assert answer.usage.decode_computed_tokens == answer.usage.computed_tokens == TOKENS
    assert (answer.usage.cached_tokens, answer.usage.pulled_tokens) == (0, 0)


async def test_a_prefix_is_loaded_and_cached():
    async with two_replicas(1) as (ids, holder, reader):
        answer = await generate(reader, with_holder(order(reader, ids), holder, HELD))
        assert answer.ids == await alone(ids)
        assert answer.usage.pulled_tokens == HELD
        assert answer.usage.pulled_bytes == bytes_of(HELD)
        assert answer.usage.computed_tokens == TOKENS - HELD
        again = await generate(reader, with_holder(order(reader, ids), holder, HELD))
        assert (again.held, again.usage.cached_tokens, again.usage.pulled_bytes) == (HELD, HELD, 0)


async def test_what_is_faster_to_compute_is_computed():
    async with two_replicas(2) as (ids, holder, reader):
        for _ in range(3):  # loads from there took minutes
            reader.prefix_pull.times.learn((holder.replica_id, "device"), bytes_of(HELD), 300.0)
        answer = await generate(reader, with_holder(order(reader, ids), holder, HELD))
        assert_computed(answer)
        assert answer.usage.pulled_bytes == 0


async def test_only_what_is_lacking_is_loaded():
    async with two_replicas(3) as (ids, holder, reader):
        await generate(reader, order(reader, ids[:96] + prompt(30, 10), max_tokens=1))
        answer = await generate(reader, with_holder(order(reader, ids), holder, HELD))
        assert answer.held == answer.usage.cached_tokens == 96
        assert answer.usage.pulled_tokens == HELD - 96
        assert answer.usage.pulled_bytes == bytes_of(HELD - 96)


async def test_a_holder_that_has_given_the_prefix_up_costs_nothing_but_the_question():
    async with two_replicas(4) as (_, holder, reader):
        other = prompt(40, TOKENS)
        answer = await generate(reader, with_holder(order(reader, other), holder, HELD))
        assert answer.ids == await alone(other)
        assert_computed(answer)


async def test_a_holder_that_has_gone():
    ids = prompt(5, TOKENS)
    async with replica("decode") as holder:
        gone = holder.peer
    async with replica("decode", mock_profile=SLOW) as reader:
        answer = await generate(reader, with_holder(order(reader, ids), gone, HELD))
        assert answer.ids == await alone(ids)
        assert_computed(answer)
        await at_rest(reader)


async def test_a_holder_that_was_restarted():
    async with two_replicas(6) as (ids, holder, reader):
        earlier = Peer(holder.replica_id, "an earlier start", holder.peer.address)
        answer = await generate(reader, with_holder(order(reader, ids), earlier, HELD))
        assert_computed(answer)


async def test_a_reader_that_is_named_as_its_own_holder_reads():
    async with two_replicas(7) as (ids, _, reader):
        answer = await generate(reader, with_holder(order(reader, ids), reader, HELD))
        assert_computed(answer)


async def test_a_load_that_fails(faulty):
    faulty(Fault(fails=True))
    async with two_replicas(8) as (ids, holder, reader):
        answer = await generate(reader, with_holder(order(reader, ids), holder, HELD))
        assert answer.ids == await alone(ids)
        assert_computed(answer)
        await at_rest(holder)  # its lease was given back
        after = await generate(reader, with_holder(order(reader, prompt(8, TOKENS)), holder, HELD))
        assert after.usage.cached_tokens == HELD, "one failure disables nobody"


async def test_a_load_that_hangs_is_given_up_and_its_pages_wait_until_it_has_ended(faulty):
    transfers = faulty(Fault(hold=True))
    async with two_replicas(9) as (ids, holder, reader):
        started_s = time.monotonic()
        answer = await generate(reader, with_holder(order(reader, ids), holder, HELD))
        took_s = time.monotonic() - started_s
        assert answer.ids == await alone(ids)
        assert_computed(answer)
        assert took_s < prefix_pull.PATIENCE_MAX_S
        await until(lambda: reader.bridge.state.pages_quarantined == HELD // 32, "the pages are in quarantine")
        transfers[0].let_go([0])
        print(f"answered after {took_s:.1f} s")


async def test_a_load_that_is_declined_is_not_used(monkeypatch):
    async with two_replicas(10) as (ids, holder, reader):
        real = holder.bridge.leases.confirm

        async def other_generation(lease_id, pages, *, timeout_s):
            wrong = tuple(type(page)(page.page, page.generation + 1, page.valid_tokens) for page in pages)
            return await real(lease_id, wrong, timeout_s=timeout_s)

        monkeypatch.setattr(holder.bridge.leases, "confirm", other_generation)
        answer = await generate(reader, with_holder(order(reader, ids), holder, HELD))
        assert answer.ids == await alone(ids)
        assert_computed(answer)


async def test_cancelled_while_loading(faulty):
    transfers = faulty(Fault(hold=True))
    async with two_replicas(11) as (ids, holder, reader):
        async with generating(reader, with_holder(order(reader, ids), holder, HELD)) as call:
            reading = asyncio.create_task(call.read())
            await until(lambda: transfers[0].reads, "the load has begun")
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: reader.bridge.state.pages_quarantined == HELD // 32, "the pages are in quarantine")
        transfers[0].let_go([0])


async def test_a_deadline_that_passes_while_loading(faulty):
    transfers = faulty(Fault(hold=True))
    async with two_replicas(13) as (ids, holder, reader):
        with pytest.raises(grpc.RpcError) as failed:
            await generate(reader, with_holder(order(reader, ids), holder, HELD), timeout_s=1.0)
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        transfers[0].let_go([0])


async def test_an_engine_that_dies_while_loading(faulty):
    faulty(Fault(hold=True))
    async with replica("decode") as holder, replica("decode", replica_id="reader", mock_profile=SLOW) as reader:
        ids = prompt(14, TOKENS)
        await generate(holder, order(holder, ids, max_tokens=1))
        asked = asyncio.create_task(generate(reader, with_holder(order(reader, ids), holder, HELD)))
        await until(lambda: holder.bridge.state.leases == 1, "the load has begun")
        await reader.bridge.stop()
        with pytest.raises(grpc.RpcError) as failed:
            await asked
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        await at_rest(holder)


async def test_without_room_for_the_prefix_it_is_computed_when_there_is_room():
    async with two_replicas(12, mock_profile="prefill_ms_per_token=1,step_ms=20") as (ids, holder, reader):
        pages = reader.bridge.state.pages_total
        filling = order(reader, prompt(50, 64), max_tokens=(pages - 4) * 32 - 64)
        async with generating(reader, filling) as call:
            await until(lambda: reader.bridge.state.running, "the pool is reserved")
            asked = asyncio.create_task(generate(reader, with_holder(order(reader, ids), holder, HELD)))
            await until(lambda: reader.bridge.state.waiting == 1, "it waits")
            call.cancel()
        answer = await asked
        assert answer.ids == await alone(ids)
        assert answer.usage.pulled_tokens == 0
