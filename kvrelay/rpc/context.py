"""What a call carries beside its message: the request id and the trace it belongs to.

Both live in context variables, so that they follow a request through `await`s and into logs without being passed along.
"""

import secrets
from collections.abc import Iterable

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_BYTES = 16
REQUEST_ID_CHARACTERS_MAX = 128
"""Longer ids would crowd every log line and header."""


def new_request_id() -> str:
    """Return a fresh random request id (hex)."""
    return secrets.token_hex(REQUEST_ID_BYTES)


def bind_request_id(request_id: str) -> None:
    """Make `request_id` the one that logs and outgoing calls of this context carry."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


def current_request_id() -> str:
    """Return the request id of this context, or an empty string."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def outgoing_headers() -> list[tuple[str, str]]:
    """Return the headers that carry this context to another process."""
    headers: list[tuple[str, str]] = []
    request_id = current_request_id()
    # gRPC refuses the whole call for a header it cannot carry; an id chosen by a client may be one.
    if _usable(request_id):
        headers.append((REQUEST_ID_HEADER, request_id))
    if trace.get_current_span().get_span_context().is_valid:
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        headers.extend(carrier.items())
    return headers


def incoming(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[str, Context]:
    """Return the request id (a fresh one when none or an unusable one came) and the trace context of a call."""
    carrier = {name: value for name, value in metadata if isinstance(value, str)}
    request_id = carrier.get(REQUEST_ID_HEADER, "")
    if not _usable(request_id):
        request_id = new_request_id()
    return request_id, TraceContextTextMapPropagator().extract(carrier, context=Context())


def _usable(request_id: str) -> bool:
    return 0 < len(request_id) <= REQUEST_ID_CHARACTERS_MAX and request_id.isascii() and request_id.isprintable()
