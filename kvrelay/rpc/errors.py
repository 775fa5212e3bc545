"""Maps the tree of errors to gRPC statuses with google.rpc details, and back.

The class name travels as `ErrorInfo.reason`, fields in `ErrorInfo.metadata`; beside it stand the details that any
gRPC client knows: `BadRequest` for invalid arguments, `RetryInfo` where waiting helps.
"""

import math
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped] # it ships no stubs

from kvrelay import errors
from kvrelay.errors import InvalidArgument, KvrelayError, Mismatch, ResourceExhausted

DOMAIN = "kvrelay"
DETAILS_KEY = "grpc-status-details-bin"

TEXT_CHARACTERS_MAX = 1024
"""Statuses travel in HTTP/2 trailers, which peers may cut off or refuse beyond 8 KiB."""

RETRY_AFTER_S_MAX = 3600.0
"""A longer hint is a mistake: nobody waits that long."""

_CLASSES: Final[dict[str, type[KvrelayError]]] = {
    cls.__name__: cls
    for cls in (
        errors.NotFound,
        errors.FailedPrecondition,
        errors.StaleIncarnation,
        errors.Unavailable,
        errors.PeerLost,
        errors.Draining,
        errors.DeadlineExceeded,
        errors.Cancelled,
        errors.Unauthenticated,
        errors.InternalError,
    )
}
"""Classes that are restored from their message alone."""

_BY_CODE: Final[dict[grpc.StatusCode, type[KvrelayError]]] = {
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    # A peer that lacks a method is of another version: nothing the caller can wait for.
    grpc.StatusCode.UNIMPLEMENTED: errors.FailedPrecondition,
    grpc.StatusCode.UNAVAILABLE: errors.PeerLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Unauthenticated,
}
"""Statuses that came without our details: from gRPC itself, a proxy, or a foreign server."""

_BROKEN_WORDS = ("rst_stream", "stream removed", "cancelling all calls", "socket closed", "goaway")
_BROKEN_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)
"""How gRPC words a connection that broke under a running call, and the statuses it may give it beside UNAVAILABLE."""

_TOO_LARGE = "larger than max"
"""How gRPC words a message over the size bound (RESOURCE_EXHAUSTED, though waiting does not help)."""

_M = TypeVar("_M", bound=Message)


def to_status(error: KvrelayError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=_cut(error.message))
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN)
    if isinstance(error, Mismatch):
        info.metadata.update(field=_cut(error.field), expected=_cut(error.expected), got=_cut(error.got))
    status.details.add().Pack(info)
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field), description=_cut(error.description)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(1000 * _retry_after_s(error.retry_after_s)))
        status.details.add().Pack(retry)
    return status


def to_trailers(error: KvrelayError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return code, details and trailing metadata of an error, as `context.abort` takes them."""
    status = to_status(error)
    return grpc.StatusCode[error.status], status.message, ((DETAILS_KEY, status.SerializeToString()),)


def from_rpc_error(error: grpc.RpcError) -> KvrelayError:
    """Return the error that a failed call stands for: the server's own where it told, else by status.

    A connection that failed or broke is `PeerLost`.
    """
    status = _status_of(error)
    info = _detail(status, error_details_pb2.ErrorInfo)
    if info is not None and info.domain == DOMAIN:
        return _restored(status, info)
    return _foreign(error, status)


def _restored(status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> KvrelayError:
    match info.reason:
        case "InvalidArgument":
            bad = _detail(status, error_details_pb2.BadRequest)
            violation = bad.field_violations[0] if bad and bad.field_violations else None
            if violation is not None:
                return InvalidArgument(violation.field, violation.description)
            return InvalidArgument("request", status.message)
        case "ResourceExhausted":
            return _exhausted(status, status.message)
        case "Mismatch":
            return Mismatch(info.metadata["field"], info.metadata["expected"], info.metadata["got"])
        case reason if reason in _CLASSES:
            return _CLASSES[reason](status.message)
        case _:  # A newer peer's class: its status is the nearest we know.
            return _by_name(code_pb2.Code.Name(status.code), status.message)


def _foreign(error: grpc.RpcError, status: status_pb2.Status) -> KvrelayError:
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded("the deadline passed before the peer answered")
    if _broke(code, text):
        return errors.PeerLost("the peer cannot be reached or its connection broke; try another one")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument("request", _cut(text))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if _TOO_LARGE in text.lower():
            return InvalidArgument("message", "larger than the peer takes in one message")
        return _exhausted(status, "the peer has no room; try again later")
    return _by_name(code.name, f"the peer answered {code.name} without saying why")


def _broke(code: grpc.StatusCode, text: str) -> bool:
    words = text.lower()
    return code is grpc.StatusCode.UNAVAILABLE or (code in _BROKEN_CODES and any(w in words for w in _BROKEN_WORDS))


def _by_name(name: str, message: str) -> KvrelayError:
    if name == "RESOURCE_EXHAUSTED":
        return ResourceExhausted(message)
    if name == "INVALID_ARGUMENT":
        return InvalidArgument("request", message)
    code = grpc.StatusCode.__members__.get(name, grpc.StatusCode.UNKNOWN)
    return _BY_CODE.get(code, errors.InternalError)(message)


def _exhausted(status: status_pb2.Status, message: str) -> ResourceExhausted:
    retry = _detail(status, error_details_pb2.RetryInfo)
    if retry is None:
        return ResourceExhausted(message)
    return ResourceExhausted(message, retry_after_s=retry.retry_delay.ToMilliseconds() / 1000)


def _status_of(error: grpc.RpcError) -> status_pb2.Status:
    status = status_pb2.Status()
    trailers: Any = error.trailing_metadata()  # A tuple or a multimap, depending on the kind of client.
    for key, value in trailers or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except DecodeError:
                status.Clear()
    return status


def _detail(status: status_pb2.Status, kind: type[_M]) -> _M | None:
    for packed in status.details:
        detail = kind()
        try:
            if packed.Unpack(detail):
                return detail
        except DecodeError:
            continue
    return None


def _retry_after_s(seconds: float) -> float:
    return min(max(0.0, seconds), RETRY_AFTER_S_MAX) if math.isfinite(seconds) else RETRY_AFTER_S_MAX


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 1] + "…"
