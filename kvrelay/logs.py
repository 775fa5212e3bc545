"""Logs: one JSON object a line on stderr, an event name with key/values.

The request id and the ids of trace and span are added from context variables, so nobody passes them along.
"""

import json
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO, TypeAlias

import structlog
from opentelemetry import trace

Logger: TypeAlias = structlog.typing.FilteringBoundLogger

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def get_logger(name: str, *, level: str = "info", stream: TextIO | None = None) -> Logger:
    """Return a logger of its own; there is no global configuration.

    Args:
        name: told as `logger` in every line.
        level: least severe level, one of LEVELS.
        stream: where lines go; None: stderr as it is at each line.
    """
    wrapped = structlog.wrap_logger(
        _Lines(stream),
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_trace,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
    )
    bound: Logger = wrapped.bind(logger=name)
    return bound


def route_stdlib_logs(logger: Logger) -> None:
    """Send what libraries log through `logging` into `logger`; for a process's entry point, once.

    Does nothing when the root logger has a handler already.
    """
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(_StdlibHandler(logger))


class _Lines:
    """The sink of a logger: writes a line at once and never raises, whatever has become of the stream."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def msg(self, message: str) -> None:
        """Write one line."""
        try:
            stream = self._stream or sys.stderr
            stream.write(message + "\n")
            stream.flush()
        except (OSError, ValueError):
            # The reader of the pipe has gone, or the stream is closed: there is nobody to tell.
            return

    debug = info = warning = error = critical = exception = log = msg


class _StdlibHandler(logging.Handler):
    def __init__(self, logger: Logger) -> None:
        super().__init__(level=logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on."""
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - a library's broken format string must not raise in our process
            text = str(record.msg)
        self._logger.log(
            record.levelno, "library.log", library=record.name, text=text, exc_info=record.exc_info or False
        )


def _add_trace(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
        event["span_id"] = trace.format_span_id(span.span_id)
    return event


def _dumps(value: Any, **_options: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
