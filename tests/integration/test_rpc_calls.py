"""What happens to one call between a real server and a real channel: errors, ids, deadlines, cancellation."""

import asyncio
import json
import time

import grpc
import grpc.aio
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.rpc import CALL_S, TREE, serving, until

from kvrelay import errors
from kvrelay.config import ServerConfig
from kvrelay.rpc.channel import DeadlineMissingError
from kvrelay.rpc.context import REQUEST_ID_HEADER, bind_request_id, current_request_id
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.telemetry import Telemetry

SERVICE = "test.Four"
PRIVATE = "the address of the database"


class Four:
    """One handler of each of the four kinds around the same behaviour, given as a coroutine function."""

    def __init__(self, behaviour):
        self.behaviour = behaviour
        self.closed = 0

    async def unary_unary(self, _request, context):
        return await self.behaviour(context)

    async def unary_stream(self, _request, context):
        try:
            yield await self.behaviour(context)
        finally:
            self.closed += 1

    async def stream_unary(self, requests, context):
        async for _ in requests:
            pass
        return await self.behaviour(context)

    async def stream_stream(self, requests, context):
        async for _ in requests:
            yield await self.behaviour(context)

    def add(self, server):
        handlers = {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(self.unary_unary),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(self.unary_stream),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(self.stream_unary),
            "StreamStream": grpc.stream_stream_rpc_method_handler(self.stream_stream),
        }
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def once():
    yield b"request"


async def call(channel, kind, *, timeout=CALL_S, **kwargs):  # noqa: ASYNC109 - gRPC's own deadline
    """Call one of the four kinds and return its answers."""
    path = f"/{SERVICE}/{kind}"
    match kind:
        case "UnaryUnary":
            return [await channel.unary_unary(path)(b"request", timeout=timeout, **kwargs)]
        case "UnaryStream":
            return [each async for each in channel.unary_stream(path)(b"request", timeout=timeout, **kwargs)]
        case "StreamUnary":
            return [await channel.stream_unary(path)(once(), timeout=timeout, **kwargs)]
        case _:
            return [each async for each in channel.stream_stream(path)(once(), timeout=timeout, **kwargs)]


KINDS = ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"]


def raising(error):
    async def behaviour(_context):
        raise error

    return behaviour


async def answering(_context):
    return b"answer"


def logged(capsys):
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize("kind", KINDS)
async def test_all_four_kinds_answer(kind):
    async with serving(Four(answering).add) as (_, channel):
        assert await call(channel, kind) == [b"answer"]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_error_class_arrives_restored(kind):
    for error in TREE:
        async with serving(Four(raising(error)).add) as (_, channel):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(channel, kind)
            got = from_rpc_error(failed.value)
            assert type(got) is type(error)
            assert got.__dict__ == error.__dict__


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "error", [ValueError(PRIVATE), TimeoutError(PRIVATE), KeyError(PRIVATE), AssertionError(PRIVATE)]
)
async def test_an_unknown_exception_leaks_nothing_and_is_logged_under_the_request_id(kind, error, capsys):
    async with serving(Four(raising(error)).add) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, kind, metadata=[(REQUEST_ID_HEADER, "r-17")])
    told = str(failed.value) + repr(failed.value.trailing_metadata())
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert PRIVATE not in told
    assert "r-17" in failed.value.details()
    (line,) = [line for line in logged(capsys) if line["event"] == "rpc.crashed"]
    assert line["request_id"] == "r-17"
    assert PRIVATE in line["exception"]


async def test_an_error_of_a_service_behind_passes_through_as_itself():
    full = errors.ResourceExhausted("the queue is full", retry_after_s=3)
    async with serving(Four(raising(full)).add) as (_, behind):

        async def forward(_context):
            return (await call(behind, "UnaryUnary"))[0]

        async with serving(Four(forward).add) as (_, channel):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(channel, "UnaryUnary")
    assert from_rpc_error(failed.value).__dict__ == full.__dict__


async def test_an_abort_by_the_handler_stays_what_it_is():
    async def abort(context):
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "beyond")

    async with serving(Four(abort).add) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "UnaryUnary")
    assert failed.value.code() is grpc.StatusCode.OUT_OF_RANGE


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_past_its_deadline_fails_as_such_and_stops_its_handler(kind):
    cancelled = asyncio.Event()

    async def hang(_context):
        try:
            await asyncio.sleep(CALL_S)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(Four(hang).add) as (server, channel):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, kind, timeout=0.1)
        assert isinstance(from_rpc_error(failed.value), errors.DeadlineExceeded)
        await until(cancelled.is_set, "handler cancelled after the deadline")
        await until(lambda: server.running == 0, "no call counted as running")


async def test_a_handler_learns_the_callers_deadline():
    async def remaining(context):
        return str(Deadline.of(context, default_s=600).left_s()).encode()

    async with serving(Four(remaining).add) as (_, channel):
        assert 0 < float((await call(channel, "UnaryUnary", timeout=CALL_S))[0]) <= CALL_S


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_without_a_deadline_is_refused_where_it_is_written(kind):
    async with serving(Four(answering).add) as (_, channel):
        with pytest.raises(DeadlineMissingError, match=f"{SERVICE}/{kind}"):
            await call(channel, kind, timeout=None)


async def test_a_client_that_cancels_a_stream_closes_the_handlers_generator_at_once():
    four = Four(answering)

    async def endless(_request, _context):
        try:
            while True:
                yield b"x" * 65536
        finally:
            four.closed += 1

    four.unary_stream = endless
    async with serving(four.add) as (server, channel):
        # The client does not read, so that the handler is stuck in writing, its generator suspended at a yield.
        stream = channel.unary_stream(f"/{SERVICE}/UnaryStream")(b"", timeout=CALL_S)
        await stream.read()
        stream.cancel()
        await until(lambda: four.closed == 1, "generator closed after the cancel")
        await until(lambda: server.running == 0, "no call counted as running")


async def test_handlers_may_write_to_the_context_instead_of_yielding():
    async def write(_request, context):
        await context.write(b"1")
        await context.write(b"2")

    four = Four(answering)
    four.unary_stream = write
    async with serving(four.add) as (_, channel):
        assert await call(channel, "UnaryStream") == [b"1", b"2"]


async def test_the_request_id_follows_the_call_into_the_next_process():
    async def tell(_context):
        return current_request_id().encode()

    async with serving(Four(tell).add) as (_, behind):

        async def forward(_context):
            return (await call(behind, "UnaryUnary"))[0]

        async with serving(Four(forward).add) as (_, channel):
            with structlog.contextvars.bound_contextvars(request_id="r-42"):
                assert await call(channel, "UnaryUnary") == [b"r-42"]


@pytest.mark.parametrize("unusable", [None, "", "x" * 129])
async def test_a_call_without_a_usable_request_id_gets_its_own(unusable):
    async def tell(_context):
        return current_request_id().encode()

    metadata = [] if unusable is None else [(REQUEST_ID_HEADER, unusable)]
    async with serving(Four(tell).add) as (_, channel):
        one = await call(channel, "UnaryUnary", metadata=metadata)
        other = await call(channel, "UnaryUnary", metadata=metadata)
    assert len(one[0]) == 32
    assert one != other


async def test_a_request_id_that_no_header_can_carry_stays_here():
    async def tell(_context):
        return current_request_id().encode()

    async with serving(Four(tell).add) as (_, channel):
        with structlog.contextvars.bound_contextvars(request_id="täb\t"):
            assert len((await call(channel, "UnaryUnary"))[0]) == 32


async def test_ids_bound_in_one_call_do_not_reach_another():
    async def bind(_context):
        before = current_request_id()
        bind_request_id("mine")
        return before.encode()

    async with serving(Four(bind).add) as (_, channel):
        answers = [(await call(channel, "UnaryUnary"))[0] for _ in range(3)]
    assert b"mine" not in answers


async def test_one_trace_spans_two_processes():
    inner, outer = InMemorySpanExporter(), InMemorySpanExporter()
    config = ServerConfig()
    behind_telemetry = Telemetry.start("behind", "b", config, spans=inner)
    telemetry = Telemetry.start("front", "f", config, spans=outer)
    async with serving(Four(answering).add, telemetry=behind_telemetry) as (_, behind):

        async def forward(_context):
            with telemetry.tracer.start_as_current_span("route"):
                return (await call(behind, "UnaryUnary"))[0]

        async with serving(Four(forward).add, telemetry=telemetry) as (_, channel):
            await call(channel, "UnaryUnary")
    telemetry.shutdown()
    behind_telemetry.shutdown()
    (there,) = inner.get_finished_spans()
    route, call_span = outer.get_finished_spans()
    assert (route.name, call_span.name) == ("route", f"{SERVICE}/UnaryUnary")
    assert there.context.trace_id == route.context.trace_id == call_span.context.trace_id
    assert there.parent.span_id == route.context.span_id
    assert route.parent.span_id == call_span.context.span_id
    assert there.attributes["rpc.response.status_code"] == "OK"
    assert there.resource.attributes["service.name"] == "behind"


async def test_a_failed_call_marks_its_span_without_the_exceptions_text():
    spans = InMemorySpanExporter()
    telemetry = Telemetry.start("test", "t", ServerConfig(), spans=spans)
    async with serving(Four(raising(ValueError(PRIVATE))).add, telemetry=telemetry) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError):
            await call(channel, "UnaryUnary")
    telemetry.shutdown()
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.attributes["rpc.response.status_code"] == "INTERNAL"
    assert PRIVATE not in span.to_json()


async def test_messages_over_the_size_bound_are_refused_as_such():
    async def large(_context):
        return b"x" * (1 << 16)

    async with serving(Four(large).add) as (server, _):
        small = grpc.aio.insecure_channel(server.address, options=(("grpc.max_receive_message_length", 1024),))
        async with small:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(small, "UnaryUnary")
    got = from_rpc_error(failed.value)
    assert isinstance(got, errors.InvalidArgument)
    assert got.field == "message"


async def test_unary_calls_are_quick_enough():
    async with serving(Four(answering).add) as (_, channel):
        began_s = time.monotonic()
        for _ in range(200):
            await call(channel, "UnaryUnary")
        print(f"{(time.monotonic() - began_s) / 200 * 1e6:.0f} us a call")
