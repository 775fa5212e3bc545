"""Connections to peers that restart, hang, vanish or are replaced."""

import asyncio
import signal
import socket
import subprocess
import sys
import time

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.rpc import CALL_S, WAIT_S, serving, until

from kvrelay import errors
from kvrelay.config import ServerConfig
from kvrelay.rpc.channel import Channels, open_channel
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.rpc.server import RpcServer
from kvrelay.telemetry import Telemetry

HANG_NOTICED_S = 10.0
"""Keepalive promises 4 s; the rest is for a loaded machine."""


def nothing(_server):
    pass


async def check(channel, *, wait_for_ready=False):
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    return (await stub.Check(request, timeout=CALL_S, wait_for_ready=wait_for_ready)).status


async def start(port=0):
    config = ServerConfig(port=port)
    server = RpcServer(config, name="test", telemetry=Telemetry.start("test", "t", config))
    await server.start()
    return server


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_peer_that_cannot_be_reached_is_lost_at_once():
    async with open_channel(f"127.0.0.1:{free_port()}") as channel:
        began_s = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await check(channel)
        assert isinstance(from_rpc_error(lost.value), errors.PeerLost)
        assert time.monotonic() - began_s < CALL_S / 2


async def test_a_peer_restarted_on_its_address_is_reached_again_through_the_same_channel():
    first = await start()
    async with open_channel(first.address) as channel:
        await check(channel)
        await first.stop(0)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await check(channel)
        second = await start(int(first.address.rpartition(":")[2]))
        began_s = time.monotonic()
        await check(channel, wait_for_ready=True)
        print(f"reached again after {time.monotonic() - began_s:.3f} s")
        await second.stop(0)


async def test_a_new_channel_does_not_inherit_the_backoff_of_an_old_one():
    port = free_port()
    async with open_channel(f"127.0.0.1:{port}") as old:
        with pytest.raises(grpc.aio.AioRpcError):
            await check(old)
        server = await start(port)
        async with open_channel(server.address) as new:
            await check(new)
        await server.stop(0)


HANGING = """
import asyncio, sys
from kvrelay.config import ServerConfig
from kvrelay.rpc.server import RpcServer, run
from kvrelay.telemetry import Telemetry

async def main():
    config = ServerConfig(log_level="error")
    server = RpcServer(config, name="test", telemetry=Telemetry.start("test", "t", config))
    print(await server.start(), flush=True)
    return await server.serve()

sys.exit(run(main()))
"""


async def test_a_stopped_peer_is_noticed_by_a_watch_without_deadline():
    process = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        async with open_channel(process.stdout.readline().strip()) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            process.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await asyncio.wait_for(watch.read(), HANG_NOTICED_S)
            print(f"noticed after {time.monotonic() - began_s:.1f} s: {lost.value.details()}")
            assert isinstance(from_rpc_error(lost.value), errors.PeerLost)
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()


async def test_one_channel_an_address():
    channels = Channels()
    assert channels.get("127.0.0.1:1") is channels.get("127.0.0.1:1")
    assert channels.get("127.0.0.1:1") is not channels.get("127.0.0.1:2")
    await channels.close()


async def test_a_dropped_address_gets_a_new_channel_while_running_calls_end_on_their_own():
    async with serving(nothing) as (server, _):
        channels = Channels()
        old = channels.get(server.address)
        watch = health_pb2_grpc.HealthStub(old).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await channels.drop(server.address)
        new = channels.get(server.address)
        assert new is not old
        await check(new)
        assert not watch.done()
        watch.cancel()
        await until(lambda: old.get_state() is grpc.ChannelConnectivity.SHUTDOWN, "old channel closed")
        await channels.close()


async def test_a_call_on_a_closed_channel_finds_its_peer_lost():
    async with serving(nothing) as (_, channel):
        await channel.close()
        with pytest.raises(errors.PeerLost):
            await check(channel)


async def test_dropping_an_unknown_address_is_no_error():
    await Channels().drop("127.0.0.1:1")


async def test_the_least_recently_used_idle_channel_gives_way():
    async with serving(nothing) as (server, _):
        channels = Channels(most=2)
        busy = channels.get(server.address)
        watch = health_pb2_grpc.HealthStub(busy).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        idle = channels.get("127.0.0.1:1")
        channels.get("127.0.0.1:2")
        assert channels.get(server.address) is busy
        assert channels.get("127.0.0.1:1") is not idle
        watch.cancel()
        await channels.close()


async def test_closing_ends_everything_at_once_and_a_count_of_calls_returns_to_zero():
    async with serving(nothing) as (server, _):
        channels = Channels()
        channel = channels.get(server.address)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await channels.drop(server.address)
        assert channel.running == 1
        await channels.close()
        await until(lambda: channel.running == 0, "no call counted as running")


async def test_a_call_that_is_never_awaited_is_counted_out_again():
    async with serving(nothing) as (_, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        await until(lambda: channel.running == 0, "no call counted as running")
