"""The tree of errors crosses the wire whole, and foreign failures find their place in it."""

import math

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from support.rpc import TREE

from kvrelay import errors
from kvrelay.errors import KvrelayError
from kvrelay.rpc.errors import (
    DETAILS_KEY,
    RETRY_AFTER_S_MAX,
    TEXT_CHARACTERS_MAX,
    from_rpc_error,
    to_status,
    to_trailers,
)


def sent(error: KvrelayError) -> grpc.aio.AioRpcError:
    """Return the error as a client sees it."""
    code, details, trailers = to_trailers(error)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=details)


def foreign(code: str, details: str = "", trailers: tuple[tuple[str, bytes], ...] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=details
    )


def test_the_table_covers_the_whole_tree():
    def all_below(cls):
        return {cls}.union(*(all_below(each) for each in cls.__subclasses__()))

    assert {type(error) for error in TREE} == all_below(KvrelayError) - {KvrelayError}


@pytest.mark.parametrize("error", TREE, ids=lambda error: type(error).__name__)
def test_every_class_is_restored_with_its_fields(error):
    got = from_rpc_error(sent(error))
    assert type(got) is type(error)
    assert got.__dict__ == error.__dict__


@pytest.mark.parametrize("error", TREE, ids=lambda error: type(error).__name__)
def test_every_class_has_the_status_it_names_and_an_error_info(error):
    status = to_status(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("kvrelay", type(error).__name__)
    assert sent(error).code().name == error.status


def test_any_grpc_client_sees_the_field_that_is_wrong():
    bad = error_details_pb2.BadRequest()
    assert to_status(TREE[0]).details[1].Unpack(bad)
    assert bad.field_violations[0].field == "sampling.temperature"
    assert bad.field_violations[0].description == "3 is not in [0, 2]"


@pytest.mark.parametrize(
    ("given_s", "told_s"),
    [(0.25, 0.25), (0.0, 0.0), (-1.0, 0.0), (math.inf, RETRY_AFTER_S_MAX), (math.nan, RETRY_AFTER_S_MAX)],
)
def test_any_grpc_client_sees_when_to_try_again(given_s, told_s):
    retry = error_details_pb2.RetryInfo()
    assert to_status(errors.ResourceExhausted("full", retry_after_s=given_s)).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1000 * told_s


def test_long_texts_are_cut_so_that_trailers_stay_small():
    error = errors.InvalidArgument("prompt", "x" * 1_000_000)
    _, details, trailers = to_trailers(error)
    assert len(details) == TEXT_CHARACTERS_MAX
    assert len(trailers[0][1]) < 4 * TEXT_CHARACTERS_MAX


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", errors.PeerLost),
        ("UNAVAILABLE", "keepalive watchdog timeout", errors.PeerLost),
        ("INTERNAL", "Received RST_STREAM with error code 2", errors.PeerLost),
        ("UNKNOWN", "Stream removed", errors.PeerLost),
        ("CANCELLED", "Cancelling all calls", errors.PeerLost),
        ("CANCELLED", "", errors.Cancelled),
        ("DEADLINE_EXCEEDED", "Stream removed (Deadline Exceeded)", errors.DeadlineExceeded),
        ("UNIMPLEMENTED", "Method not found!", errors.FailedPrecondition),
        ("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!", errors.ResourceExhausted),
        (
            "RESOURCE_EXHAUSTED",
            "Stream removed (SERVER: Received message larger than max (2 vs. 1))",
            errors.InvalidArgument,
        ),
        ("INVALID_ARGUMENT", "bad", errors.InvalidArgument),
        ("PERMISSION_DENIED", "", errors.Unauthenticated),
        ("UNAUTHENTICATED", "", errors.Unauthenticated),
        ("NOT_FOUND", "", errors.NotFound),
        ("UNKNOWN", "Unexpected <class 'ValueError'>: secret", errors.InternalError),
        ("DATA_LOSS", "", errors.InternalError),
    ],
)
def test_failures_that_grpc_itself_or_a_foreign_server_reports_find_their_place(code, details, expected):
    got = from_rpc_error(foreign(code, details))
    assert type(got) is expected
    assert "secret" not in got.message


def test_a_class_of_a_newer_version_becomes_the_nearest_one_known():
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="asleep")
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain="kvrelay", reason="Sleeping"))
    got = from_rpc_error(foreign("UNAVAILABLE", "asleep", ((DETAILS_KEY, status.SerializeToString()),)))
    assert isinstance(got, errors.Unavailable)
    assert got.message == "asleep"


@given(st.binary(max_size=64))
def test_garbage_in_the_details_never_raises(garbage):
    got = from_rpc_error(foreign("NOT_FOUND", "", ((DETAILS_KEY, garbage),)))
    assert isinstance(got, KvrelayError)
