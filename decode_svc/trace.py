"""What one attempt leaves in traces, metrics and the log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.decode_events import Finished
from kvrelay.engine.protocol import PullStats
from kvrelay.telemetry import Telemetry
from kvrelay.types import Peer, Usage


class Trace:
    """Spans of an attempt: decode.queue, kv.pull, confirm, decode."""

    def __init__(self, telemetry: Telemetry, *, model: str) -> None:
        self._telemetry = telemetry
        self._model = model
        self._mark_s = time.monotonic()

    def held(self, tokens: int) -> None:
        """The engine has taken the request in."""
        self._span("decode.queue", {"kvrelay.tokens.held": tokens})

    def prompt_ready(self) -> None:
        """The engine goes on by itself from here: what follows is decoding (and reading the prompt, when local)."""
        self._mark_s = time.monotonic()

    def pulled(self, peer: Peer, stats: PullStats) -> None:
        """KV has come in."""
        now_s = time.monotonic()
        gb_s = stats.bytes / stats.busy_s / 1e9 if stats.busy_s > 0 else 0.0
        self._telemetry.record_span(
            "kv.pull",
            start_s=now_s - stats.elapsed_s,
            end_s=now_s,
            attributes={
                "kvrelay.peer": peer.replica_id,
                "kvrelay.pull.bytes": stats.bytes,
                "kvrelay.pull.pages": stats.pages,
                "kvrelay.pull.tokens": stats.tokens,
                "kvrelay.pull.descriptors": stats.descriptors,
                "kvrelay.pull.transport": stats.transport,
                "kvrelay.pull.busy_s": stats.busy_s,
                "kvrelay.pull.gb_s": gb_s,
            },
        )
        self._telemetry.logger.info(
            "kv_pulled",
            peer=peer.replica_id,
            bytes=stats.bytes,
            tokens=stats.tokens,
            descriptors=stats.descriptors,
            transport=stats.transport,
            gb_s=round(gb_s, 3),
        )

    @contextmanager
    def confirm(self, peer: Peer) -> Iterator[None]:
        """Around the question for the verdict."""
        with self._telemetry.tracer.start_as_current_span("confirm", attributes={"kvrelay.peer": peer.replica_id}):
            yield

    def leg_failed(self, peer: Peer, reason: str) -> None:
        """A prefill replica could not help."""
        self._telemetry.logger.warning("prefill_leg_failed", peer=peer.replica_id, address=peer.address, reason=reason)

    def leg_crashed(self, peer: Peer, error: Exception) -> None:
        """Following a prefill replica failed by a bug."""
        self._telemetry.logger.error("prefill_leg_crashed", peer=peer.replica_id, exc_info=error)

    def finished(self, finished: Finished) -> None:
        """The answer is complete."""
        usage = finished.usage
        self._span("decode", {"gen_ai.usage.output_tokens": usage.output_tokens})
        self._telemetry.logger.info(
            "answer_done",
            reason=finished.reason.value,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            pulled_tokens=usage.pulled_tokens,
            output_tokens=usage.output_tokens,
        )

    def spent(self, usage: Usage) -> None:
        """The attempt is over, whatever way; this is where its prompt's KV came from, as far as is known."""
        self._telemetry.metrics.usage(usage, model=self._model)

    def _span(self, name: str, attributes: dict[str, int]) -> None:
        now_s = time.monotonic()
        self._telemetry.record_span(name, start_s=self._mark_s, end_s=now_s, attributes=attributes)
        self._mark_s = now_s
