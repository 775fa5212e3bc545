"""Telemetry is an instance, not a global: two in one process keep to themselves."""

import socket
import time
import urllib.request

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrelay.config import TelemetryConfig
from kvrelay.errors import InvalidArgument
from kvrelay.instruments import TPOT_BOUNDS_S, TTFT_BOUNDS_S
from kvrelay.telemetry import Telemetry
from kvrelay.types import Usage

SCRAPE_S = 10.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_S) as answer:
        return answer.read().decode()


def points(reader):
    """Return the data points of all metrics by name."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_two_in_one_process_keep_their_spans_and_metrics_apart():
    exporters = [InMemorySpanExporter(), InMemorySpanExporter()]
    readers = [InMemoryMetricReader(), InMemoryMetricReader()]
    both = [
        Telemetry.start("replica", f"r{i}", TelemetryConfig(), spans=exporters[i], metrics_reader=readers[i])
        for i in range(2)
    ]
    for i, telemetry in enumerate(both):
        with telemetry.tracer.start_as_current_span(f"span-{i}"):
            telemetry.metrics.first_token(0.1 * (i + 1), model="m")
    sums = [points(reader)["gen_ai.server.time_to_first_token"][0].sum for reader in readers]
    for telemetry in both:
        telemetry.shutdown()
    assert [[span.name for span in exporter.get_finished_spans()] for exporter in exporters] == [["span-0"], ["span-1"]]
    assert sums == pytest.approx([0.1, 0.2])


def test_no_global_provider_is_set():
    telemetry = Telemetry.start("replica", "r0", TelemetryConfig(), spans=InMemorySpanExporter())
    telemetry.shutdown()
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_the_conventions_histograms_have_the_conventions_buckets():
    reader = InMemoryMetricReader()
    telemetry = Telemetry.start("router", "0", TelemetryConfig(), metrics_reader=reader)
    telemetry.metrics.first_token(0.07, model="m")
    telemetry.metrics.output_token(0.02, model="m")
    seen = points(reader)
    telemetry.shutdown()
    (ttft,) = seen["gen_ai.server.time_to_first_token"]
    (tpot,) = seen["gen_ai.server.time_per_output_token"]
    assert ttft.explicit_bounds == TTFT_BOUNDS_S
    assert tpot.explicit_bounds == TPOT_BOUNDS_S
    assert ttft.attributes["gen_ai.request.model"] == "m"


def test_usage_is_counted_by_where_the_kv_came_from():
    reader = InMemoryMetricReader()
    telemetry = Telemetry.start("router", "0", TelemetryConfig(), metrics_reader=reader)
    usage = Usage(prompt_tokens=10, cached_tokens=1, pulled_tokens=2, computed_tokens=7, pulled_bytes=4096)
    telemetry.metrics.usage(usage, model="m")
    telemetry.metrics.usage(usage, model="m")
    values = {name: data[0].value for name, data in points(reader).items()}
    telemetry.shutdown()
    assert values == {
        "kvrelay.tokens.cached": 2,
        "kvrelay.tokens.pulled": 4,
        "kvrelay.tokens.computed": 14,
        "kvrelay.kv.pulled_bytes": 8192,
    }


def test_prometheus_serves_each_instance_on_its_own_port():
    ports = [free_port(), free_port()]
    both = [Telemetry.start("replica", f"r{i}", TelemetryConfig(metrics_port=ports[i])) for i in range(2)]
    for i, telemetry in enumerate(both):
        telemetry.metrics.usage(Usage(cached_tokens=i + 1, pulled_bytes=8), model="m")
        telemetry.metrics.first_token(0.1, model="m")
    texts = [scrape(port) for port in ports]
    for telemetry in both:
        telemetry.shutdown()
    for i, text in enumerate(texts):
        assert f'service_instance_id="r{i}"' in text
        (line,) = [line for line in text.splitlines() if line.startswith("kvrelay_tokens_cached_total{")]
        assert float(line.split()[-1]) == i + 1
        assert "kvrelay_kv_pulled_bytes_total{" in text
        assert "gen_ai_server_time_to_first_token_seconds_bucket{" in text
    with pytest.raises(OSError, match="refused"):
        scrape(ports[0])


def test_a_metrics_port_in_use_is_refused_by_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidArgument) as refused:
            Telemetry.start("replica", "r0", TelemetryConfig(metrics_port=taken.getsockname()[1]))
    assert refused.value.field == "metrics_port"


def test_a_span_can_be_made_of_something_that_is_over():
    spans = InMemorySpanExporter()
    telemetry = Telemetry.start("decode", "d0", TelemetryConfig(), spans=spans)
    with telemetry.tracer.start_as_current_span("request") as request:
        captured = otel_context.get_current()
    end_s = time.monotonic() - 1
    telemetry.record_span(
        "kv.pull", start_s=end_s - 0.25, end_s=end_s, attributes={"kvrelay.pull.bytes": 7}, parent=captured
    )
    telemetry.shutdown()
    pull = next(span for span in spans.get_finished_spans() if span.name == "kv.pull")
    assert pull.parent.span_id == request.get_span_context().span_id
    assert (pull.end_time - pull.start_time) / 1e9 == pytest.approx(0.25, abs=1e-6)
    assert pull.end_time / 1e9 == pytest.approx(time.time() - 1, abs=0.5)
    assert pull.attributes["kvrelay.pull.bytes"] == 7


def test_without_export_trace_ids_still_flow():
    telemetry = Telemetry.start("router", "0", TelemetryConfig())
    with telemetry.tracer.start_as_current_span("outer") as outer:
        inner = telemetry.tracer.start_span("inner")
    assert outer.get_span_context().is_valid
    assert inner.get_span_context().trace_id == outer.get_span_context().trace_id
    assert not inner.is_recording()
    telemetry.record_span("late", start_s=0, end_s=1)
    telemetry.metrics.usage(Usage(cached_tokens=1), model="m")
    telemetry.shutdown()


def test_without_export_a_span_costs_next_to_nothing():
    telemetry = Telemetry.start("router", "0", TelemetryConfig())
    count = 2000
    began_s = time.perf_counter()
    for _ in range(count):
        with telemetry.tracer.start_as_current_span("span", attributes={"a": 1}):
            telemetry.metrics.first_token(0.1, model="m")
    each_us = (time.perf_counter() - began_s) / count * 1e6
    print(f"{each_us:.1f} us a span")
    assert each_us < 500


def test_shutting_down_twice_is_no_error():
    telemetry = Telemetry.start("router", "0", TelemetryConfig(), spans=InMemorySpanExporter())
    telemetry.shutdown()
    telemetry.shutdown()
