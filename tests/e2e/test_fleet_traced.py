"""One request is one trace across router, decode and prefill; its figures reach Prometheus; logs carry its id."""

import json
import urllib.request

import pytest
from support.collector import collecting

from bench.local_fleet import LocalFleet, wait_for
from kvrelay.up.ports import FreePorts

STAGES = {"route", "reserve", "prefill.queue", "prefill.compute", "kv.pull", "confirm", "decode"}
PROCESSES = 4  # router, registry, prefill, decode, on consecutive ports
PAGE_TIMEOUT_S = 10.0
METRICS = (
    "gen_ai_server_time_to_first_token_seconds_count",
    "gen_ai_server_time_per_output_token_seconds_count",
    "kvrelay_tokens_cached",
    "kvrelay_kv_pulled_bytes",
)


def page(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PAGE_TIMEOUT_S) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def observed():
    """Serve one request on a fleet that exports; yields (answer, collector, metrics text, log lines)."""
    metrics_port = FreePorts().next()
    with collecting() as collector:
        flags = {
            "engine": "mock",
            "model": "mock",
            "disaggregate": "always",
            "kv_mib": 16,
            "metrics_port": metrics_port,
        }
        with LocalFleet(flags | {"otlp_endpoint": f"http://{collector.address}"}) as fleet, fleet.client() as client:
            answer = client.generate("x" * 200, max_tokens=8)
            metrics = "".join(page(metrics_port + process) for process in range(PROCESSES))
            names = lambda: {span.name for span in collector.spans}  # noqa: E731
            wait_for("every stage's span to arrive", lambda: names() >= STAGES)
            logs = fleet.log.read_text()
    return answer, collector, metrics, logs


def test_stages_of_a_request_are_one_trace_across_processes(observed):
    answer, collector, _, _ = observed
    traces = {}
    for span in collector.spans:
        if span.name in STAGES:
            traces.setdefault(span.trace_id, set()).add(span.name)
    assert [stages for stages in traces.values() if stages >= STAGES], traces
    assert {"router", "prefill", "decode"} <= collector.service_names
    assert answer.usage.pulled_bytes > 0


def test_pull_span_tells_bytes_descriptors_and_rate(observed):
    answer, collector, _, _ = observed
    (pull,) = [span for span in collector.spans if span.name == "kv.pull"]
    told = {each.key: each.value for each in pull.attributes}
    assert told["kvrelay.pull.bytes"].int_value == answer.usage.pulled_bytes
    assert told["kvrelay.pull.descriptors"].int_value >= 1
    assert "kvrelay.pull.gb_s" in told


@pytest.mark.parametrize("metric", METRICS)
def test_figures_reach_prometheus(observed, metric):
    _, _, metrics, _ = observed
    assert metric in {line.partition("{")[0].removesuffix("_total") for line in metrics.splitlines()}


def test_logs_are_json_with_the_request_id(observed):
    answer, _, _, logs = observed
    lines = [line.partition("| ")[2] for line in logs.splitlines() if "| {" in line]
    events = [json.loads(line) for line in lines]
    tellers = {event["logger"] for event in events if event.get("request_id") == answer.decision.request_id}
    assert {"prefill", "decode"} <= tellers or len(tellers) >= 2, tellers
    assert all("event" in event and "timestamp" in event for event in events)
