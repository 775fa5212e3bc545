"""Life of a server process: where it listens, what it tells of itself, how it ends."""

# ruff: noqa: N802 - gRPC names the methods of servicers

import asyncio
import signal
import subprocess
import sys
import time

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.rpc import CALL_S, WAIT_S, serving, until

from kvrelay import errors
from kvrelay.config import ServerConfig
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.rpc.server import EXIT_CUT_OFF, EXIT_FORCED_BASE, RpcServer
from kvrelay.telemetry import Telemetry
from kvrelay.v1 import kv_source_pb2, kv_source_pb2_grpc, prefill_pb2, prefill_pb2_grpc

ANY = "0.0.0.0"  # noqa: S104 - the case under test
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PREFILL = "kvrelay.v1.Prefill"
SOURCE = "kvrelay.v1.KvSource"


class Source(kv_source_pb2_grpc.KvSourceServicer):
    async def Handshake(self, _request, _context):
        return kv_source_pb2.HandshakeResponse()

    async def LeasePrefix(self, _request, _context):
        return kv_source_pb2.LeasePrefixResponse()

    async def Extend(self, _request, _context):
        return kv_source_pb2.ExtendResponse()

    async def Confirm(self, _request, _context):
        return kv_source_pb2.ConfirmResponse(valid=True)

    async def Release(self, _request, _context):
        return kv_source_pb2.ReleaseResponse()


class Held(prefill_pb2_grpc.PrefillServicer):
    """Grants at once, and gives the first token when told to."""

    def __init__(self):
        self.go_on = asyncio.Event()

    async def Start(self, _request, _context):
        yield prefill_pb2.StartResponse(granted=prefill_pb2.Granted())
        await self.go_on.wait()
        yield prefill_pb2.StartResponse(first_token=prefill_pb2.FirstToken())


class Fleet:
    """A server with a Prefill that waits and a KvSource that answers."""

    def __init__(self):
        self.held = Held()

    def add(self, server):
        prefill_pb2_grpc.add_PrefillServicer_to_server(self.held, server.grpc)
        kv_source_pb2_grpc.add_KvSourceServicer_to_server(Source(), server.grpc)
        server.services([PREFILL, SOURCE])


def server_of(**config):
    config = ServerConfig(**config)
    return RpcServer(config, name="test", telemetry=Telemetry.start("test", "t", config))


async def check(channel, service=""):
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_S)).status


async def test_port_0_tells_the_real_port_and_is_reachable():
    async with serving(Fleet().add) as (server, channel):
        host, _, port = server.address.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        await kv_source_pb2_grpc.KvSourceStub(channel).Extend(kv_source_pb2.ExtendRequest(), timeout=CALL_S)


async def test_the_advertised_host_is_told_and_the_bound_one_listened_on():
    server = server_of(bind=ANY, advertise="prefill-1.example")
    told = await server.start()
    assert told.startswith("prefill-1.example:")
    async with open_channel(f"127.0.0.1:{told.rpartition(':')[2]}") as channel:
        assert await check(channel) == SERVING
    await server.stop(0)


@pytest.mark.parametrize("advertise", ["", "localhost", "127.0.0.1"])
async def test_listening_on_all_interfaces_needs_an_address_others_reach(advertise):
    with pytest.raises(errors.InvalidArgument, match="set --advertise"):
        server_of(bind=ANY, advertise=advertise)


async def test_a_port_in_use_is_refused_with_the_reason():
    async with serving(Fleet().add) as (server, _):
        other = server_of(port=int(server.address.rpartition(":")[2]))
        with pytest.raises(errors.InvalidArgument, match="another process") as refused:
            await other.start()
        assert refused.value.field == "port"
        await other.stop(0)


async def test_health_follows_each_services_own_check():
    async with serving(Fleet().add) as (server, channel):
        assert [await check(channel, name) for name in ("", PREFILL, SOURCE)] == [SERVING] * 3
        server.health.set_check(PREFILL, lambda: False)
        assert [await check(channel, name) for name in ("", PREFILL, SOURCE)] == [NOT_SERVING, NOT_SERVING, SERVING]


async def test_a_check_that_raises_is_not_healthy():
    def broken():
        raise RuntimeError("wedged")

    async with serving(Fleet().add) as (server, channel):
        server.health.set_check(PREFILL, broken)
        assert await check(channel, PREFILL) == NOT_SERVING


async def test_health_of_an_unknown_service_is_not_found():
    async with serving(Fleet().add) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await check(channel, "no.Such")
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watchers_see_health_turn_and_return_and_drain():
    healthy = True
    async with serving(Fleet().add) as (server, channel):
        server.health.set_check(PREFILL, lambda: healthy)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=PREFILL))
        assert (await watch.read()).status == SERVING
        healthy = False
        assert (await asyncio.wait_for(watch.read(), WAIT_S)).status == NOT_SERVING
        healthy = True
        assert (await asyncio.wait_for(watch.read(), WAIT_S)).status == SERVING
        await server.health.drain()
        assert (await asyncio.wait_for(watch.read(), WAIT_S)).status == NOT_SERVING
        watch.cancel()


async def test_services_are_reflected():
    async def ask():
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async with serving(Fleet().add) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = [each async for each in stub.ServerReflectionInfo(ask(), timeout=CALL_S)]
    names = {service.name for service in answer.list_services_response.service}
    assert names >= {PREFILL, SOURCE, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"}


async def test_channelz_counts_calls():
    async with serving(Fleet().add) as (_, channel):
        await check(channel)
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        servers = (await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=CALL_S)).server
    assert any(each.data.calls_succeeded for each in servers)


async def test_a_drain_refuses_new_work_finishes_old_work_and_lets_pulls_end():
    fleet = Fleet()
    async with serving(fleet.add) as (server, channel):
        prefill, source = prefill_pb2_grpc.PrefillStub(channel), kv_source_pb2_grpc.KvSourceStub(channel)
        old = prefill.Start(prefill_pb2.StartRequest(), timeout=CALL_S)
        assert (await old.read()).HasField("granted")
        served = asyncio.create_task(server.serve())
        server.end()
        await until(lambda: server.draining, "draining")

        assert await check(channel) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await prefill.Start(prefill_pb2.StartRequest(), timeout=CALL_S).read()
        assert isinstance(from_rpc_error(refused.value), errors.Draining)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await source.LeasePrefix(kv_source_pb2.LeasePrefixRequest(), timeout=CALL_S)
        assert isinstance(from_rpc_error(refused.value), errors.Draining)
        assert (await source.Confirm(kv_source_pb2.ConfirmRequest(), timeout=CALL_S)).valid
        await source.Extend(kv_source_pb2.ExtendRequest(), timeout=CALL_S)
        assert not served.done()

        fleet.held.go_on.set()
        assert (await old.read()).HasField("first_token")
        assert await old.read() is grpc.aio.EOF
        assert await asyncio.wait_for(served, WAIT_S) == 0


async def test_a_drain_runs_its_callback_while_calls_are_still_answered():
    async with serving(Fleet().add) as (server, channel):
        stub = kv_source_pb2_grpc.KvSourceStub(channel)

        async def drain():
            await stub.Release(kv_source_pb2.ReleaseRequest(), timeout=CALL_S)

        server.end()
        assert await server.serve(drain=drain) == 0


async def test_a_drain_that_takes_too_long_is_cut_off():
    fleet = Fleet()
    async with serving(fleet.add, config=ServerConfig(drain_timeout_s=0.05)) as (server, channel):
        stream = prefill_pb2_grpc.PrefillStub(channel).Start(prefill_pb2.StartRequest(), timeout=CALL_S)
        await stream.read()
        server.end()
        assert await asyncio.wait_for(server.serve(), WAIT_S) == EXIT_CUT_OFF
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await stream.read()
        assert isinstance(from_rpc_error(lost.value), errors.PeerLost)


async def test_a_drain_whose_callback_fails_still_stops():
    async def drain():
        raise RuntimeError("registry away")

    async with serving(Fleet().add) as (server, _):
        server.end()
        assert await asyncio.wait_for(server.serve(drain=drain), WAIT_S) == EXIT_CUT_OFF


async def test_endless_watches_do_not_hold_up_a_drain():
    async with serving(Fleet().add) as (server, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        server.end()
        assert await asyncio.wait_for(server.serve(), WAIT_S) == 0
        watch.cancel()


async def test_a_process_that_must_end_says_why_with_its_exit_code():
    async with serving(Fleet().add) as (server, _):
        server.end(70)
        assert await asyncio.wait_for(server.serve(), WAIT_S) == 70


async def test_stopping_twice_is_no_error():
    server = server_of()
    await server.start()
    await server.stop(0)
    await server.stop(0)


PROCESS = """
import asyncio, sys
from kvrelay.config import ServerConfig
from kvrelay.rpc.server import RpcServer, run
from kvrelay.telemetry import Telemetry

async def main():
    config = ServerConfig(log_level="error", drain_timeout_s=60)
    server = RpcServer(config, name="test", telemetry=Telemetry.start("test", "t", config))
    address = await server.start()
    served = asyncio.create_task(server.serve(drain=drain))
    await asyncio.sleep(0)  # let it take the signals
    print(address, type(asyncio.get_running_loop()).__module__, flush=True)
    return await served

{drain}

sys.exit(run(main()))
"""

ENDS = "async def drain(): print('draining', flush=True)"
NEVER_ENDS = "async def drain():\n    print('draining', flush=True)\n    await asyncio.sleep(60)"
STUCK = "import time\nasync def drain():\n    print('draining', flush=True)\n    while True: time.sleep(0.01)"


class Process:
    def __init__(self, drain, loop):
        hide = "import sys; sys.modules['uvloop'] = None\n" if loop == "asyncio" else ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", hide + PROCESS.format(drain=drain)], stdout=subprocess.PIPE, text=True
        )
        self.address, self.loop = self.process.stdout.readline().split()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(WAIT_S)
        self.process.stdout.close()

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self):
        began_s = time.monotonic()
        code = self.process.wait(WAIT_S)
        print(f"ended after {time.monotonic() - began_s:.3f} s")
        return code


loops = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
signals = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@loops
@signals
def test_the_first_signal_drains_and_exits_with_0(loop, number):
    with Process(ENDS, loop) as process:
        assert process.loop.startswith(loop)
        process.signal(number)
        assert process.process.stdout.readline() == "draining\n"
        assert process.wait() == 0


@loops
@pytest.mark.parametrize("drain", [NEVER_ENDS, STUCK], ids=["drain_waits", "loop_is_stuck"])
def test_the_second_signal_ends_the_process_at_once(loop, drain):
    with Process(drain, loop) as process:
        process.signal(signal.SIGTERM)
        assert process.process.stdout.readline() == "draining\n"
        process.signal(signal.SIGINT)
        assert process.wait() == EXIT_FORCED_BASE + signal.SIGINT
