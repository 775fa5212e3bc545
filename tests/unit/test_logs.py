"""Logs are JSON lines that carry the ids of their request and trace."""

import io
import json
import logging

import pytest
import structlog
from opentelemetry import trace

from kvrelay.logs import get_logger, route_stdlib_logs
from kvrelay.rpc.context import bind_request_id
from kvrelay.tracing import IdTracer


@pytest.fixture(autouse=True)
def clean_context():
    structlog.contextvars.clear_contextvars()
    yield
    structlog.contextvars.clear_contextvars()


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_event_with_its_values():
    stream = io.StringIO()
    get_logger("router", stream=stream).info("replica.seen", replica="p0", pages=7)
    (line,) = lines(stream)
    assert line.items() >= {"event": "replica.seen", "replica": "p0", "pages": 7, "level": "info"}.items()
    assert line["logger"] == "router"
    assert "request_id" not in line
    assert "trace_id" not in line


def test_ids_of_request_and_trace_are_added():
    stream = io.StringIO()
    bind_request_id("r-1")
    with IdTracer().start_as_current_span("call") as span:
        get_logger("router", stream=stream).info("event")
    (line,) = lines(stream)
    assert line["request_id"] == "r-1"
    assert line["trace_id"] == trace.format_trace_id(span.get_span_context().trace_id)
    assert line["span_id"] == trace.format_span_id(span.get_span_context().span_id)


def test_lines_below_the_level_are_dropped():
    stream = io.StringIO()
    logger = get_logger("router", level="warning", stream=stream)
    logger.info("quiet")
    logger.warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_an_exception_is_one_line_with_its_traceback():
    stream = io.StringIO()
    logger = get_logger("router", stream=stream)
    try:
        raise ValueError("cause")  # noqa: TRY301
    except ValueError:
        logger.exception("step.failed")
    (line,) = lines(stream)
    assert "ValueError: cause" in line["exception"]


def test_values_json_does_not_know_are_written_as_text():
    stream = io.StringIO()
    get_logger("router", stream=stream).info("event", key=b"\x00", where={1, 2})
    assert len(lines(stream)) == 1


def test_a_closed_stream_hurts_nobody():
    stream = io.StringIO()
    stream.close()
    get_logger("router", stream=stream).info("event")


def test_what_libraries_log_becomes_lines_too(monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    stream = io.StringIO()
    route_stdlib_logs(get_logger("library", stream=stream))
    route_stdlib_logs(get_logger("library", stream=stream))
    assert len(root.handlers) == 1
    logging.getLogger("some.library").warning("lost %d of %d", 1, 2)
    logging.getLogger("some.library").warning("broken %d", "format")
    first, second = lines(stream)
    assert first.items() >= {"library": "some.library", "text": "lost 1 of 2", "level": "warning"}.items()
    assert second["text"] == "broken %d"
