"""Times and usage of one request over all its attempts. Pure."""

from dataclasses import dataclass, replace

from kvrelay.decode_events import Accepted, Finished, LegMoved, LegState
from kvrelay.types import Peer, Usage


@dataclass(slots=True, kw_only=True)
class Tally:
    """What is told at the end.

    Attributes:
        prompt_tokens: of the client's prompt.
        began_at_s, first_at_s, last_at_s: arrival, first and last token, monotonic seconds; 0: none yet.
        written: tokens of this stream (a continued answer had others before).
        attempts: made so far.
        prefill: replica that really read the prompt remotely, in the last attempt.
        prefill_reason: why the prompt was read elsewhere than was planned.
    """

    prompt_tokens: int
    began_at_s: float
    first_at_s: float = 0.0
    last_at_s: float = 0.0
    written: int = 0
    attempts: int = 0
    prefill: Peer | None = None
    prefill_reason: str = ""
    _held: int = 0
    _remote: bool = False
    _usage: Usage | None = None

    def attempt(self, *, remote: bool) -> None:
        """Another attempt begins."""
        self.attempts += 1
        self.prefill, self.prefill_reason = None, ""
        self._held, self._remote, self._usage = 0, remote, None

    def wrote(self, tokens: int, *, now_s: float) -> None:
        """Tokens came."""
        self.first_at_s = self.first_at_s or now_s
        self.last_at_s = now_s
        self.written += tokens

    def told(self, event: Accepted | LegMoved | Finished) -> None:
        """Take in what the decode replica says of itself."""
        match event:
            case Accepted(held):
                self._held = held
            case LegMoved(LegState.READY | LegState.PULLED, peer, _):
                self.prefill = peer
            case LegMoved(LegState.FAILED, _, reason):
                self.prefill_reason = reason
            case LegMoved(LegState.LOCAL, _, reason):
                self.prefill, self._remote = None, False
                self.prefill_reason = reason or self.prefill_reason
            case Finished():
                self._usage = event.usage

    def usage(self, output_tokens: int) -> Usage:
        """Return what the request cost.

        An answer that was ended by a stop string has no report of its replica: then only what was told at its
        beginning is known.
        """
        usage = self._usage or self._begun()
        # A later attempt counts the output before it as prompt; the client's prompt is what it is.
        cached = min(usage.cached_tokens, self.prompt_tokens)
        return replace(usage, prompt_tokens=self.prompt_tokens, cached_tokens=cached, output_tokens=output_tokens)

    @property
    def ttft_s(self) -> float:
        """Time to first token, s; 0 while there is none."""
        return self.first_at_s - self.began_at_s if self.first_at_s else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first, s; 0 while there are fewer than two."""
        return (self.last_at_s - self.first_at_s) / (self.written - 1) if self.written > 1 else 0.0

    def _begun(self) -> Usage:
        lacking = max(0, self.prompt_tokens - self._held)
        if self._remote:
            return Usage(cached_tokens=self._held, pulled_tokens=lacking)
        return Usage(cached_tokens=self._held, computed_tokens=lacking, decode_computed_tokens=lacking)
