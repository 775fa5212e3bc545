"""Export to an OTLP collector: what arrives, and that nobody waits for a collector that is away."""

import socket
import threading
import time

import pytest
from support.collector import collecting

from kvrelay.config import TelemetryConfig
from kvrelay.telemetry import EXPORT_TIMEOUT_S, SHUTDOWN_TIMEOUT_S, SPAN_QUEUE_MAX, Telemetry

MARGIN_S = 10.0
"""What a loaded machine may add to a promised bound."""


@pytest.fixture
def collector():
    with collecting() as collector:
        yield collector


def shutdown_takes_s(telemetry):
    began_s = time.monotonic()
    telemetry.shutdown()
    took_s = time.monotonic() - began_s
    print(f"shutdown took {took_s:.3f} s")
    return took_s


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_spans_and_metrics_arrive_at_the_latest_with_the_shutdown(collector, scheme):
    telemetry = Telemetry.start("router", "r0", TelemetryConfig(otlp_endpoint=scheme + collector.address))
    with telemetry.tracer.start_as_current_span("route") as span:
        telemetry.record_span("reserve", start_s=time.monotonic() - 1, end_s=time.monotonic())
        telemetry.metrics.first_token(0.1, model="m")
    telemetry.shutdown()
    assert {each.name for each in collector.spans} == {"route", "reserve"}
    assert {each.trace_id for each in collector.spans} == {span.get_span_context().trace_id.to_bytes(16, "big")}
    assert collector.service_names == {"router"}
    assert "gen_ai.server.time_to_first_token" in collector.metrics


def test_a_collector_that_is_not_there_delays_nothing():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    telemetry = Telemetry.start("router", "r0", TelemetryConfig(otlp_endpoint=address))
    began_s = time.monotonic()
    for _ in range(SPAN_QUEUE_MAX + 100):
        telemetry.tracer.start_span("span").end()
    print(f"{time.monotonic() - began_s:.3f} s for {SPAN_QUEUE_MAX + 100} spans")
    assert time.monotonic() - began_s < MARGIN_S
    assert shutdown_takes_s(telemetry) < SHUTDOWN_TIMEOUT_S + EXPORT_TIMEOUT_S + MARGIN_S


def test_a_collector_that_hangs_delays_a_shutdown_by_its_bound_only(collector):
    collector.answers.clear()
    telemetry = Telemetry.start("router", "r0", TelemetryConfig(otlp_endpoint=f"http://{collector.address}"))
    for _ in range(SPAN_QUEUE_MAX):
        telemetry.tracer.start_span("span").end()
    assert shutdown_takes_s(telemetry) < SHUTDOWN_TIMEOUT_S + MARGIN_S


def test_no_thread_is_left_behind(collector):
    before = threading.active_count()
    telemetry = Telemetry.start("router", "r0", TelemetryConfig(otlp_endpoint=f"http://{collector.address}"))
    telemetry.tracer.start_span("span").end()
    telemetry.shutdown()
    until_s = time.monotonic() + MARGIN_S
    while threading.active_count() > before + 4:  # the collector's own workers
        assert time.monotonic() < until_s
        time.sleep(0.01)
