"""What every call goes through on a server: request id, trace, span, count of running calls, mapping of errors."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from opentelemetry import trace

from kvrelay.errors import Cancelled, DeadlineExceeded, Draining, InternalError, KvrelayError
from kvrelay.rpc.channel import ENDLESS_METHODS
from kvrelay.rpc.context import bind_request_id, current_request_id, incoming
from kvrelay.rpc.errors import from_rpc_error, to_trailers
from kvrelay.telemetry import Telemetry

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_INFRASTRUCTURE: Final = ("/grpc.health.", "/grpc.reflection.", "/grpc.channelz.")
"""Services that say nothing about requests: no spans, never refused, not waited for."""

SERVED_WHILE_DRAINING: Final = frozenset(
    {
        # Running pulls must come to their end.
        "/kvrelay.v1.KvSource/Handshake",
        "/kvrelay.v1.KvSource/Extend",
        "/kvrelay.v1.KvSource/Confirm",
        "/kvrelay.v1.KvSource/Release",
        # What gives things back, or only looks.
        "/kvrelay.v1.KvRegistry/Deregister",
        "/kvrelay.v1.KvRegistry/Settle",
        "/kvrelay.v1.Router/GetStatus",
    }
)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of a server.

    Attributes:
        draining: refuse new work.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self.draining = False
        self._telemetry = telemetry
        self._handlers: dict[str, Handler] = {}
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Calls under way that a drain waits for."""
        return self._running

    async def idle(self) -> None:
        """Wait until no such call is under way."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Return the wrapped handler of a call."""
        method = handler_call_details.method
        known = self._handlers.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(_INFRASTRUCTURE):
            return handler
        # As many entries as there are methods: names that are not served never get here.
        wrapped = self._handlers[method] = _wrapped(handler, lambda inner: self._guarded(method, inner))
        return wrapped

    def _guarded(self, method: str, inner: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Awaitable[Any]]:
        name = method.removeprefix("/")
        attributes = {"rpc.system.name": "grpc", "rpc.method": name}

        async def guarded(request: Any, context: Context) -> Any:
            request_id, trace_context = incoming(context.invocation_metadata() or ())
            bind_request_id(request_id)
            with (
                self._counted(method),
                self._telemetry.tracer.start_as_current_span(
                    name,
                    trace_context,
                    kind=trace.SpanKind.SERVER,
                    attributes=attributes,
                    # Messages of exceptions may hold what no dashboard should show; statuses are set below.
                    record_exception=False,
                    set_status_on_exception=False,
                ) as span,
            ):
                return await self._answered(method, inner, request, context, span)

        return guarded

    async def _answered(
        self, method: str, inner: Callable[[Any, Context], Any], request: Any, context: Context, span: trace.Span
    ) -> Any:
        began_s = time.monotonic()
        status = "OK"
        try:
            if self.draining and method not in SERVED_WHILE_DRAINING:
                raise Draining("this process is shutting down; try another one")  # noqa: TRY301
            return await _run(inner, request, context)
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        except grpc.aio.AbortError:
            status = context.code().name if isinstance(context.code(), grpc.StatusCode) else "UNKNOWN"
            raise
        except Exception as error:
            if _gone(error, context):
                status = "CANCELLED"
                raise
            known = self._known(error, method, context)
            status = known.status
            await _abort(context, known)
        finally:
            span.set_attribute("rpc.response.status_code", status)
            if status in _SERVER_FAULTS:
                span.set_status(trace.StatusCode.ERROR, status)
            self._telemetry.metrics.call_served(
                time.monotonic() - began_s, method=method.removeprefix("/"), status=status
            )

    def _known(self, error: Exception, method: str, context: Context) -> KvrelayError:
        known = _as_known(error, context)
        logger = self._telemetry.logger
        if known is None:
            logger.error("rpc.crashed", method=method, exc_info=error)
            return InternalError(f"internal error; the log has the cause under request id {current_request_id()}")
        if isinstance(known, InternalError):
            logger.error("rpc.failed", method=method, error=type(known).__name__, reason=known.message, exc_info=error)
        elif not isinstance(known, Cancelled):
            logger.info("rpc.refused", method=method, error=type(known).__name__, reason=known.message)
        return known

    @contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        if method in ENDLESS_METHODS:
            yield
            return
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


_SERVER_FAULTS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Statuses that make a server's span an error; the others are the caller's doing (semantic conventions for RPC)."""


def _wrapped(handler: Handler, guard: Callable[[Any], Any]) -> Handler:
    """Return the handler with `guard` around its function, whichever of the four kinds it is."""
    for make, inner in (
        (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    ):
        if inner is not None:
            wrapped: Handler = make(guard(inner), handler.request_deserializer, handler.response_serializer)
            return wrapped
    return handler


async def _run(inner: Callable[[Any, Context], Any], request: Any, context: Context) -> Any:
    """Run a handler; streams are written here, so that a cancelled call closes its generator at once, in its task."""
    result = inner(request, context)
    if inspect.isasyncgen(result):
        async with aclosing(result) as responses:
            await _write_all(responses, context)
        return None
    return await result if inspect.isawaitable(result) else result


async def _write_all(responses: AsyncIterator[Any], context: Context) -> None:
    async for response in responses:
        await context.write(response)


async def _abort(context: Context, error: KvrelayError) -> None:
    code, details, trailers = to_trailers(error)
    await context.abort(code, details, trailers)


def _gone(error: Exception, context: Context) -> bool:
    """True when the call is over already, so that there is nobody to tell."""
    return isinstance(error, grpc.aio.BaseError) and (context.cancelled() or context.done())


def _as_known(error: Exception, context: Context) -> KvrelayError | None:
    if isinstance(error, KvrelayError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error)
    left = context.time_remaining()
    if isinstance(error, TimeoutError) and left is not None and left <= 0:
        return DeadlineExceeded("the deadline passed before there was an answer")
    return None
