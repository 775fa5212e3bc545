"""A child's log lines, turned from JSON into text for people. Pure."""

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any, Final

UNSAID: Final = frozenset(
    {"event", "level", "timestamp", "logger", "instance", "server", "trace_id", "span_id", "exception"}
)
"""Keys that have a place of their own, or that the name before the line and the request id tell already."""

LOUD: Final = frozenset({"warning", "error", "critical"})
"""Levels that are said; the others go without saying."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line to show; `level` is empty for one that is no log line."""

    text: str
    level: str = ""


def as_text(line: str) -> Line:
    """Return "HH:MM:SS event key=value …" (local time) for a JSON log line, its traceback below; other lines as is."""
    try:
        record = json.loads(line)
        level, event = str(record["level"]), str(record["event"])
    except (ValueError, TypeError, KeyError):
        return Line(line)
    said = [_clock(record.get("timestamp"))] + [level.upper()] * (level in LOUD) + [event]
    said += [f"{key}={_value(value)}" for key, value in record.items() if key not in UNSAID]
    below = [str(record["exception"])] if "exception" in record else []
    return Line("\n".join([" ".join(word for word in said if word), *below]), level)


def _clock(timestamp: object) -> str:
    try:
        when = dt.datetime.fromisoformat(str(timestamp))
    except ValueError:
        return ""
    return f"{when.astimezone():%H:%M:%S}"


def _value(value: Any) -> str:
    """Return a value without quotes where it reads as one word."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and value and not any(character in ' \t\n"=' for character in value):
        return value
    return json.dumps(value, ensure_ascii=False)
