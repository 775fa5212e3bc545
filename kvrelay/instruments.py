"""The metrics that every part of kvrelay shares, under the semantic conventions' names where there is one."""

from typing import Final

from opentelemetry.metrics import Meter

from kvrelay.types import Usage

TTFT_BOUNDS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
"""Bucket bounds of `gen_ai.server.time_to_first_token`, as the conventions recommend."""

TPOT_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Bucket bounds of `gen_ai.server.time_per_output_token`, as the conventions recommend."""

ERROR_BOUNDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bucket bounds of prediction errors, as shares of what really was."""

RPC_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Bucket bounds of `rpc.server.call.duration`, as the conventions recommend."""


class Instruments:
    """Records what happened; every method returns at once and never raises for a finite number."""

    def __init__(self, meter: Meter) -> None:
        self._ttft = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="Time to generate the first token of a successful answer",
            explicit_bucket_boundaries_advisory=TTFT_BOUNDS_S,
        )
        self._tpot = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            unit="s",
            description="Time per output token after the first of a successful answer",
            explicit_bucket_boundaries_advisory=TPOT_BOUNDS_S,
        )
        self._cached = meter.create_counter(
            "kvrelay.tokens.cached", unit="{token}", description="Prompt tokens whose KV was already there"
        )
        self._pulled = meter.create_counter(
            "kvrelay.tokens.pulled", unit="{token}", description="Prompt tokens whose KV came from another replica"
        )
        self._computed = meter.create_counter(
            "kvrelay.tokens.computed", unit="{token}", description="Prompt tokens that were computed"
        )
        self._pulled_bytes = meter.create_counter(
            "kvrelay.kv.pulled_bytes", unit="By", description="KV bytes read from other replicas"
        )
        self._load_choices = meter.create_counter(
            "kvrelay.kv.load_choices",
            unit="{choice}",
            description="Prefixes held elsewhere or in a lower tier: loaded, computed, or computed after a failed load",
        )
        self._load_error = meter.create_histogram(
            "kvrelay.kv.load_prediction_error",
            unit="1",
            description="Difference between predicted and real time of a load, as a share of the real time",
            explicit_bucket_boundaries_advisory=ERROR_BOUNDS,
        )
        self._tier_written = meter.create_counter(
            "kvrelay.tier.written_bytes", unit="By", description="KV bytes written through to a lower tier"
        )
        self._tier_unwritten = meter.create_counter(
            "kvrelay.tier.unwritten_pages",
            unit="{page}",
            description="Pages worth writing to a lower tier that found too many on their way",
        )
        self._tier_loaded = meter.create_counter(
            "kvrelay.tier.loaded_bytes", unit="By", description="KV bytes loaded from a lower tier"
        )
        self._compute_error = meter.create_histogram(
            "kvrelay.kv.compute_prediction_error",
            unit="1",
            description="Difference between predicted and real time of computing a prompt, as a share of the real time",
            explicit_bucket_boundaries_advisory=ERROR_BOUNDS,
        )
        self._rpc = meter.create_histogram(
            "rpc.server.call.duration",
            unit="s",
            description="Duration of calls served",
            explicit_bucket_boundaries_advisory=RPC_BOUNDS_S,
        )

    def first_token(self, seconds: float, *, model: str) -> None:
        """Record a time to first token, s."""
        self._ttft.record(seconds, _gen_ai(model))

    def output_token(self, seconds: float, *, model: str) -> None:
        """Record an answer's mean time per output token after the first, s."""
        self._tpot.record(seconds, _gen_ai(model))

    def usage(self, usage: Usage, *, model: str) -> None:
        """Count a request's prompt tokens by where their KV came from, and the bytes pulled.

        Count it in one process a request, or the fleet's sums are wrong.
        """
        attributes = {"gen_ai.request.model": model}
        self._cached.add(usage.cached_tokens, attributes)
        self._pulled.add(usage.pulled_tokens, attributes)
        self._computed.add(usage.computed_tokens, attributes)
        self._pulled_bytes.add(usage.pulled_bytes + usage.prefill_pulled_bytes, attributes)

    def prefix_loaded(self, *, tier: str, expected_s: float, elapsed_s: float) -> None:
        """Record a prefix loaded from another replica or a lower tier, in `elapsed_s`, against the prediction."""
        self._load_choices.add(1, {"kvrelay.tier": tier, "kvrelay.choice": "loaded"})
        if elapsed_s > 0:
            self._load_error.record(
                abs(elapsed_s - expected_s) / elapsed_s, {"kvrelay.tier": tier} | _side(expected_s, elapsed_s)
            )

    def prompt_computed(self, *, expected_s: float, elapsed_s: float) -> None:
        """Record what of a prompt was computed for another replica, in `elapsed_s`, against the prediction."""
        if elapsed_s > 0:
            self._compute_error.record(abs(elapsed_s - expected_s) / elapsed_s, _side(expected_s, elapsed_s))

    def prefix_computed(self, *, tier: str) -> None:
        """Record a prefix that was computed because loading it was predicted to be slower."""
        self._load_choices.add(1, {"kvrelay.tier": tier, "kvrelay.choice": "computed"})

    def prefix_failed(self, *, tier: str, reason: str) -> None:
        """Record a prefix that could not be loaded; `reason` is one word."""
        self._load_choices.add(1, {"kvrelay.tier": tier, "kvrelay.choice": "failed", "kvrelay.reason": reason})

    def tier_wrote(self, size_bytes: int, *, unwritten_pages: int, tier: str) -> None:
        """Count bytes written through to a lower tier, and pages that were worth it but found no place on the way."""
        self._tier_written.add(size_bytes, {"kvrelay.tier": tier})
        self._tier_unwritten.add(unwritten_pages, {"kvrelay.tier": tier})

    def tier_loaded(self, size_bytes: int, *, tier: str) -> None:
        """Count bytes loaded from a lower tier."""
        self._tier_loaded.add(size_bytes, {"kvrelay.tier": tier})

    def call_served(self, seconds: float, *, method: str, status: str) -> None:
        """Record a served call: its duration in s, full method name, and gRPC status name."""
        self._rpc.record(seconds, {"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": status})


def _side(expected_s: float, elapsed_s: float) -> dict[str, str]:
    return {"kvrelay.side": "slower" if elapsed_s > expected_s else "faster"}


def _gen_ai(model: str) -> dict[str, str]:
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": model,
    }
