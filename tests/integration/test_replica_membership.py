"""A replica's entry in the registry, over a real store."""

import asyncio
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import pytest
from support.registry import Mirror, registry, until_done
from support.replicas import compose, config, generate, order, prompt, replica
from support.valkey import Valkey

from kv_registry.worker import Registry
from kvrelay.config import RegistryConfig
from kvrelay.replica.process import EXIT_BROKEN
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.registry_client import RegistryClient
from kvrelay.telemetry import Telemetry

FAST = {"heartbeat_interval_s": 0.05}


@pytest.fixture
def valkey():
    server = Valkey()
    try:
        yield server
        server.check()
    finally:
        server.close()


@asynccontextmanager
async def fleet(valkey: Valkey):
    """A registry and a mirror that follows the model "mock"."""
    async with registry(valkey.url) as (process, client), Mirror().following(client, "mock") as mirror:
        yield process.server.address, mirror


def holds_of(mirror: Mirror, process) -> bool:
    ledger = process._ledger
    return ledger.held > 0 and mirror.blocks.get(process.replica_id) == ledger._held


async def test_a_replica_enters_tells_its_blocks_and_leaves(valkey):
    async with fleet(valkey) as (address, mirror):
        async with replica("both", registry=address, **FAST) as process:
            name = process.replica_id
            await until_done(lambda: name in mirror.replicas, "the replica is seen")
            assert mirror.replicas[name].peer == process.peer
            assert mirror.replicas[name].identity == process.identity
            await generate(process, order(process, prompt(1, 200)))
            await until_done(lambda: holds_of(mirror, process), "its blocks are seen")
            await until_done(lambda: name in mirror.states and mirror.states[name].steps > 0, "its state is seen")
            assert mirror.states[name].ready
        await until_done(lambda: mirror.gone, "it has left")
        assert mirror.gone == [(name, process.incarnation, "deregistered")]


async def test_blocks_that_give_way_are_told(valkey):
    async with fleet(valkey) as (address, mirror), replica("both", registry=address, **FAST) as process:
        for seed in range(20):  # about 20 * 32 pages through a pool of 512
            await generate(process, order(process, prompt(seed, 1000), max_tokens=1))
        await until_done(lambda: holds_of(mirror, process), "exactly the blocks that are left are seen")
        assert process._ledger.held <= process.bridge.state.pages_total


async def test_a_store_that_lost_everything_is_told_everything_again(valkey):
    async with fleet(valkey) as (address, mirror), replica("both", registry=address, **FAST) as process:
        await generate(process, order(process, prompt(2, 300)))
        await until_done(lambda: holds_of(mirror, process), "its blocks are seen")
        before = mirror.replicas[process.replica_id].epoch
        valkey.empty()
        await until_done(
            lambda: holds_of(mirror, process) and mirror.replicas[process.replica_id].epoch != before,
            "it is back under a new epoch with its blocks",
        )
        assert mirror.replicas[process.replica_id].peer == process.peer


async def test_without_a_registry_a_replica_serves_and_enters_later(valkey):
    port = free_port()
    async with replica("both", registry=f"127.0.0.1:{port}", **FAST) as served:
        await until_done(lambda: served._membership.degraded, "the registry is missed")
        assert len((await generate(served, order(served, prompt(3, 100)))).ids) == 16
        async with later(valkey, port):
            await until_done(lambda: served._membership.registered, "it has entered")
            assert not served._membership.degraded


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def later(valkey: Valkey, port: int):
    given = RegistryConfig(port=port, redis_url=valkey.url)
    process = Registry(given, Telemetry.start("kv_registry", "later", given))
    await process.start()
    try:
        yield
    finally:
        await process.stop()


async def test_a_replica_that_does_not_fit_the_pool_exits_with_the_reason(valkey, capfd):
    async with fleet(valkey) as (address, mirror), replica("both", registry=address, **FAST) as first:
        await until_done(lambda: mirror.replicas, "the first one sets the contract")
        other = compose(config("both", registry=address, page_tokens=64, block_tokens=64, **FAST))
        await other.start()
        assert await other.serve() == EXIT_BROKEN
        assert list(mirror.replicas) == [first.replica_id]
    assert "block_tokens" in capfd.readouterr().err


async def test_a_draining_replica_is_seen_draining_then_gone(valkey):
    async with fleet(valkey) as (address, mirror):
        process = compose(config("both", registry=address, mock_profile="step_ms=20", **FAST))
        await process.start()
        served = asyncio.create_task(process.serve())
        running = asyncio.create_task(generate(process, order(process, prompt(4, 100), max_tokens=100)))
        await until_done(lambda: process.bridge.state.running, "an answer is being written")
        process.server.end()
        await until_done(
            lambda: process.replica_id in mirror.states and mirror.states[process.replica_id].draining,
            "it is seen draining",
        )
        assert len((await running).ids) == 100
        assert await served == 0
        await until_done(lambda: mirror.gone, "it has left")


@contextmanager
def registry_elsewhere(valkey: Valkey):
    """A registry on a thread and loop of its own; gives its address."""
    up, done = threading.Event(), threading.Event()
    address = []

    async def serve() -> None:
        async with registry(valkey.url) as (process, _client):
            address.append(process.server.address)
            up.set()
            while not done.is_set():  # noqa: ASYNC110 - set from another thread
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert up.wait(20)
        yield address[0]
    finally:
        done.set()
        thread.join(20)


async def test_a_busy_front_does_not_delay_the_heartbeat(valkey):
    with registry_elsewhere(valkey) as address:
        async with replica("both", registry=address, liveness_ttl_s=0.5, **FAST) as process:
            channel = open_channel(address)
            async with Mirror().following(RegistryClient(channel), "mock") as mirror:
                await until_done(lambda: mirror.replicas, "the replica is seen")
                time.sleep(2.0)  # noqa: ASYNC251 - the front is held up on purpose
                await generate(process, order(process, prompt(5, 100)))
                assert mirror.gone == []
            await channel.close()
