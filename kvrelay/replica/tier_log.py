"""Counts and logs what moves between an engine's pool and its lower tiers."""

from kvrelay.engine.protocol import TierLoad, TierWrote
from kvrelay.telemetry import Telemetry


class TierLog:
    """Takes the engine's events about tiers."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._metrics = telemetry.metrics
        self._logger = telemetry.logger

    def __call__(self, event: TierLoad | TierWrote) -> None:
        """Record an event."""
        if isinstance(event, TierWrote):
            self._metrics.tier_wrote(event.bytes, unwritten_pages=event.unwritten_pages, tier=event.tier)
        else:
            self._load(event)

    def _load(self, event: TierLoad) -> None:
        tier = event.tier
        if event.choice == "computed":
            self._metrics.prefix_computed(tier=tier)
            return
        self._metrics.tier_loaded(event.bytes, tier=tier)
        if event.choice == "loaded":
            self._metrics.prefix_loaded(tier=tier, expected_s=event.expected_s, elapsed_s=event.elapsed_s)
        else:
            self._metrics.prefix_failed(tier=tier, reason="missing")
        self._logger.info(
            "tier_load",
            tier=tier,
            choice=event.choice,
            tokens=event.tokens,
            bytes=event.bytes,
            expected_s=round(event.expected_s, 6),
            elapsed_s=round(event.elapsed_s, 6),
        )
