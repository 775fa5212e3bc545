"""Traces, metrics and logs of one process, or of one part of it: every instance has its own providers.

Without an OTLP endpoint and a Prometheus port nothing is recorded; trace ids still flow through logs and calls.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry, start_http_server

from kvrelay import __version__
from kvrelay.config import ServerConfig, TelemetryConfig
from kvrelay.errors import InvalidArgument
from kvrelay.instruments import Instruments
from kvrelay.logs import Logger, get_logger
from kvrelay.tracing import IdTracer

__all__ = ["Telemetry", "get_logger"]

SPAN_QUEUE_MAX: Final = 4096
"""Spans waiting for export; over it the oldest go. A few hundred requests' worth."""

SPAN_BATCH_MAX: Final = 512
SPAN_INTERVAL_S: Final = 1.0
"""Time between exports: short, so that a trace can be looked at while its request is remembered."""

METRIC_INTERVAL_S: Final = 10.0
"""Time between exports of metrics, as dashboards commonly sample."""

EXPORT_TIMEOUT_S: Final = 2.0
"""Longest wait for the collector in one export; requests never wait for it at all."""

SHUTDOWN_TIMEOUT_S: Final = 3.0
"""Longest wait for last exports at shutdown."""

LOOPBACK: Final = "127.0.0.1"
"""Where metrics are served by a process that has no bind address."""


@dataclass(kw_only=True)
class Telemetry:
    """What a process tells of itself.

    Attributes:
        tracer: makes spans; `tracer.start_as_current_span(name)`.
        meter: makes instruments beyond those of `metrics`.
        metrics: the instruments that every part of kvrelay shares.
        logger: structured logger.
    """

    tracer: trace.Tracer
    meter: metrics.Meter
    metrics: Instruments
    logger: Logger
    _traces: TracerProvider | None = None
    _meters: MeterProvider | None = None
    _exporters: list[SpanExporter | OTLPMetricExporter] = field(default_factory=list)
    _endpoint: "_PrometheusEndpoint | None" = None

    @classmethod
    def start(
        cls,
        service: str,
        instance: str,
        config: TelemetryConfig,
        *,
        spans: SpanExporter | None = None,
        metrics_reader: MetricReader | None = None,
    ) -> Self:
        """Start telemetry to where `config` says.

        Args:
            service: `service.name`, such as "router".
            instance: `service.instance.id`, such as a replica's id.
            config: where it goes; a ServerConfig's bind address is that of the Prometheus endpoint too.
            spans: one more exporter of spans.
            metrics_reader: one more reader of metrics.

        Raises:
            InvalidArgument: the Prometheus port cannot be had.
        """
        resource = Resource.create(
            {"service.name": service, "service.instance.id": instance, "service.version": __version__}
        )
        endpoint = _PrometheusEndpoint(config) if config.metrics_port else None
        otlp = _otlp_exporters(config.otlp_endpoint) if config.otlp_endpoint else None
        span_exporters = [each for each in (spans, otlp and otlp[0]) if each]
        readers = [each for each in (metrics_reader, endpoint and endpoint.reader, otlp and _periodic(otlp[1])) if each]
        traces = _tracer_provider(resource, span_exporters) if span_exporters else None
        meters = MeterProvider(readers, resource, shutdown_on_exit=False) if readers else None
        meter = meters.get_meter("kvrelay", __version__) if meters else metrics.NoOpMeter("kvrelay", __version__)
        return cls(
            tracer=traces.get_tracer("kvrelay", __version__) if traces else IdTracer(),
            meter=meter,
            metrics=Instruments(meter),
            logger=get_logger(service, level=config.log_level).bind(instance=instance),
            _traces=traces,
            _meters=meters,
            _exporters=list(otlp or ()),
            _endpoint=endpoint,
        )

    def record_span(
        self,
        name: str,
        *,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, AttributeValue] | None = None,
        parent: Context | None = None,
    ) -> None:
        """Make a span of something that is over, such as an event the engine told of.

        Args:
            name: name of the span.
            start_s: when it began, `time.monotonic()` seconds.
            end_s: when it ended, likewise.
            attributes: what is known of it.
            parent: context it belongs to (`opentelemetry.context.get_current()` of the request); None: the current one.
        """
        epoch_s = time.time() - time.monotonic()
        span = self.tracer.start_span(
            name, context=parent, attributes=attributes, start_time=round((epoch_s + start_s) * 1e9)
        )
        span.end(end_time=round((epoch_s + end_s) * 1e9))

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Export what is left, within `timeout_s` whatever the collector does; further calls do nothing."""
        traces, meters, endpoint = self._traces, self._meters, self._endpoint
        self._traces = self._meters = self._endpoint = None
        steps = [each.shutdown for each in (traces, meters) if each is not None]
        threads = [threading.Thread(target=step, daemon=True, name="telemetry-shutdown") for step in steps]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        for exporter in self._exporters if any(thread.is_alive() for thread in threads) else ():
            # Ends the export that hangs, and with it the thread that waits for it.
            exporter.shutdown()
        if endpoint is not None:
            endpoint.close()


class _PrometheusEndpoint:
    """Serves the metrics of one instance to Prometheus, from a registry of its own."""

    def __init__(self, config: TelemetryConfig) -> None:
        registry = CollectorRegistry()
        host = config.bind if isinstance(config, ServerConfig) else LOOPBACK
        try:
            self._server, self._thread = start_http_server(config.metrics_port, addr=host, registry=registry)
        except OSError as error:
            raise InvalidArgument(
                "metrics_port", f"cannot listen on {host} port {config.metrics_port}: {error.strerror}"
            ) from error
        self.reader = PrometheusMetricReader(registry=registry)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SHUTDOWN_TIMEOUT_S)


def _otlp_exporters(endpoint: str) -> tuple[OTLPSpanExporter, OTLPMetricExporter]:
    # An endpoint without scheme means plain gRPC, as with our own addresses.
    insecure = not endpoint.startswith("https://")
    return (
        OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S),
        OTLPMetricExporter(endpoint=endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S),
    )


def _periodic(exporter: OTLPMetricExporter) -> MetricReader:
    return PeriodicExportingMetricReader(exporter, METRIC_INTERVAL_S * 1e3, EXPORT_TIMEOUT_S * 1e3)


def _tracer_provider(resource: Resource, exporters: list[SpanExporter]) -> TracerProvider:
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=SPAN_QUEUE_MAX,
                max_export_batch_size=SPAN_BATCH_MAX,
                schedule_delay_millis=SPAN_INTERVAL_S * 1e3,
            )
        )
    return provider
