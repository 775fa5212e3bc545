"""What moves between pool and tier is counted and logged by the front."""

from types import SimpleNamespace

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvrelay.engine.protocol import TierLoad, TierWrote
from kvrelay.instruments import Instruments
from kvrelay.replica.tier_log import TierLog


class Lines(list):
    def info(self, event, **values):
        self.append((event, values))


def load(choice, size_bytes):
    return TierLoad(tier="disk", choice=choice, tokens=64, bytes=size_bytes, expected_s=0.1, elapsed_s=0.2)


def test_loads_and_writes_are_counted_by_tier_and_outcome():
    reader, lines = InMemoryMetricReader(), Lines()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    record = TierLog(SimpleNamespace(metrics=Instruments(meters.get_meter("test")), logger=lines))
    for event in (
        TierWrote(tier="disk", bytes=1000, unwritten_pages=2),
        load("loaded", 500),
        load("failed", 100),
        load("computed", 900),
    ):
        record(event)
    [resource] = reader.get_metrics_data().resource_metrics
    metrics = {metric.name: list(metric.data.data_points) for metric in resource.scope_metrics[0].metrics}
    for name, value in (("written_bytes", 1000), ("unwritten_pages", 2), ("loaded_bytes", 600)):
        [point] = metrics[f"kvrelay.tier.{name}"]
        assert (point.value, dict(point.attributes)) == (value, {"kvrelay.tier": "disk"})
    choices = {point.attributes["kvrelay.choice"]: point.value for point in metrics["kvrelay.kv.load_choices"]}
    assert choices == {"loaded": 1, "failed": 1, "computed": 1}
    assert [point.sum for point in metrics["kvrelay.kv.load_prediction_error"]] == [0.5]
    assert [values["choice"] for _, values in lines] == ["loaded", "failed"]
    meters.shutdown()
