"""How `kvrelay up` shows what its children log."""

import io
import json

import pytest

from kvrelay.cli.screen import LogScreen
from kvrelay.config import UpConfig
from kvrelay.logs import get_logger
from kvrelay.up.lines import Line, as_text


def logged(level="info", event="replica_ready", **values):
    """Return a line as a process of kvrelay writes it."""
    stream = io.StringIO()
    getattr(get_logger("decode", level="debug", stream=stream).bind(instance="decode-0"), level)(event, **values)
    return stream.getvalue().rstrip("\n")


@pytest.fixture(autouse=True)
def noon_in_the_log(monkeypatch):
    monkeypatch.setattr("kvrelay.up.lines._clock", lambda _: "12:00:00")


def test_an_event_is_shown_with_its_time_and_values_and_without_what_the_prefix_says():
    assert as_text(logged(model="mock", pages=12)) == Line("12:00:00 replica_ready model=mock pages=12", "info")


def test_values_that_are_no_single_word_are_quoted():
    line = as_text(logged(error="no answer", empty="", ids=[1, 2], share=0.123456789, ok=True, nothing=None))
    assert line.text.partition("replica_ready ")[2] == (
        'error="no answer" empty="" ids=[1, 2] share=0.123457 ok=true nothing=null'
    )


@pytest.mark.parametrize(("level", "said"), [("debug", ""), ("info", ""), ("warning", "WARNING "), ("error", "ERROR ")])
def test_levels_that_matter_are_said(level, said):
    assert as_text(logged(level)) == Line(f"12:00:00 {said}replica_ready", level)


def test_a_traceback_stands_below_its_event():
    try:
        _ = 1 // 0
    except ZeroDivisionError:
        line = logged("error", "failed", exc_info=True)
    first, *below = as_text(line).text.split("\n")
    assert first == "12:00:00 ERROR failed"
    assert below[-1].startswith("ZeroDivisionError: ")


@pytest.mark.parametrize("line", ["", "plain words", "{broken", '{"no": "event"}', "[1]", "7", "null"])
def test_what_is_no_log_line_is_left_as_it_is(line):
    assert as_text(line) == Line(line)


def test_the_request_id_is_shown_and_the_trace_is_not():
    text = as_text(
        json.dumps({"event": "e", "level": "info", "request_id": "r1", "trace_id": "t", "span_id": "s"})
    ).text
    assert text == "12:00:00 e request_id=r1"


def test_people_get_text_and_programs_get_json(capsys):
    line = logged("warning", "kv.read_failed", peer="prefill-0")
    LogScreen().log("decode-0", line)
    LogScreen(as_json=True).log("decode-0", line)
    assert capsys.readouterr().err.splitlines() == [
        "decode-0   | 12:00:00 WARNING kv.read_failed peer=prefill-0",
        f"decode-0   | {line}",
    ]
    assert UpConfig().log_format == "text"


def test_what_the_store_says_at_its_end_is_not_shown(capsys):
    LogScreen().log("store", "1:signal-handler (1) Received SIGTERM scheduling shutdown...")
    LogScreen().log("store", "1:M 1 Jan 2026 00:00:00.000 # Valkey is now ready to exit, bye bye...")
    assert capsys.readouterr().err == ""
