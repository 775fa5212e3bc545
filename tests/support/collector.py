"""An OTLP collector that keeps what is exported to it."""

# ruff: noqa: N802 - gRPC names the methods of servicers

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps what is exported to it."""

    def __init__(self):
        self.spans = []
        self.metrics = []
        self.service_names = set()
        self.answers = threading.Event()
        self.answers.set()

    def add(self, server):
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), server)


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector):
        self.collector = collector

    def Export(self, request, _context):
        self.collector.answers.wait(ANSWER_TIMEOUT_S)
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.collector.service_names.add(names["service.name"])
            for scope in resource.scope_spans:
                self.collector.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector):
        self.collector = collector

    def Export(self, request, _context):
        self.collector.answers.wait(ANSWER_TIMEOUT_S)
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.collector.metrics.extend(metric.name for metric in scope.metrics)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port; `address` tells where."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    collector.add(server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    collector.answers.set()
    server.stop(None).wait(STOP_TIMEOUT_S)
