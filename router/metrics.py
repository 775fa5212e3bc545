"""What routers count beside the metrics that all parts share."""

from kvrelay.telemetry import Telemetry


class RouterMetrics:
    """Time to first token, time per output token, and how much of what the fleet had cached was reached.

    Cached tokens that were really used are counted where the answer is written (`kvrelay.tokens.cached`).
    """

    def __init__(self, telemetry: Telemetry, *, model: str) -> None:
        self._shared = telemetry.metrics
        self._model = model
        meter = telemetry.meter
        self._prompt = meter.create_counter(
            "kvrelay.tokens.prompt", unit="{token}", description="Prompt tokens of dispatched requests"
        )
        self._available = meter.create_counter(
            "kvrelay.tokens.available", unit="{token}", description="Of these, cached somewhere in the fleet"
        )
        self._captured = meter.create_counter(
            "kvrelay.tokens.captured", unit="{token}", description="Of these, cached on a replica that was chosen"
        )
        self._retries = meter.create_counter(
            "kvrelay.router.retries", unit="{attempt}", description="Attempts after the first, by what ended the last"
        )

    def dispatched(self, *, prompt_tokens: int, available_tokens: int, captured_tokens: int) -> None:
        """Count a request's prompt when it is first dispatched."""
        attributes = {"gen_ai.request.model": self._model}
        self._prompt.add(prompt_tokens, attributes)
        self._available.add(available_tokens, attributes)
        self._captured.add(captured_tokens, attributes)

    def retried(self, error: str) -> None:
        """Count another attempt; `error` is the class of the error that made it necessary."""
        self._retries.add(1, {"error.type": error})

    def finished(self, *, ttft_s: float, tpot_s: float) -> None:
        """Record the times of a complete answer; 0 where there is none."""
        if ttft_s:
            self._shared.first_token(ttft_s, model=self._model)
        if tpot_s:
            self._shared.output_token(tpot_s, model=self._model)
