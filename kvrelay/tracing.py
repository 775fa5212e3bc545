"""A tracer that records nothing but keeps trace ids flowing."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags


class IdTracer(trace.Tracer):
    """Makes spans that carry their parent's context on, or a fresh trace id where there is none.

    Logs of one request share a trace id, and a fleet in which only some processes export keeps one trace.
    """

    def start_span(self, name: str, context: Context | None = None, *_args: Any, **_kwargs: Any) -> trace.Span:
        """Return a span that records nothing."""
        del name
        parent = trace.get_current_span(context).get_span_context()
        return NonRecordingSpan(parent if parent.is_valid else _fresh())

    @contextmanager
    def start_as_current_span(  # type: ignore[override] # ours is no decorator; nothing here uses that form
        self, name: str, context: Context | None = None, *_args: Any, **_kwargs: Any
    ) -> Iterator[trace.Span]:
        """Make a span that records nothing the current one."""
        with trace.use_span(
            self.start_span(name, context), record_exception=False, set_status_on_exception=False
        ) as span:
            yield span


def _fresh() -> SpanContext:
    # Ids of zero are invalid; `or 1` costs less than drawing again.
    return SpanContext(
        trace_id=secrets.randbits(128) or 1,
        span_id=secrets.randbits(64) or 1,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
