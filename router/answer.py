"""One answer as the client sees it: tokens in, text out, each token once, nothing past the end. No I/O."""

import array

from tokenizers import Tokenizer

from kvrelay.client.values import Delta
from kvrelay.errors import PeerLost
from kvrelay.rpc.convert import TokenSpan
from kvrelay.types import FinishReason, Sampling, TokenArray, TokenLogprobs
from router.detokenizer import Detokenizer
from router.stops import StopFilter


class Answer:
    """Collects the output over all attempts of a request.

    Args:
        prompt_tokens: tokens before the first one of the answer.
        sampling: with `max_tokens` given.
        eos_ids: the model's own end ids.
        tokenizer: of the model.
        tell_ids: deltas carry token ids (and log-probabilities, where there are any).

    Attributes:
        output: tokens so far; they are final.
        reason: why it ended, as far as the tokens themselves tell.
    """

    def __init__(
        self,
        *,
        prompt_tokens: int,
        sampling: Sampling,
        eos_ids: tuple[int, ...],
        tokenizer: Tokenizer,
        tell_ids: bool = False,
    ) -> None:
        self.output: TokenArray = array.array("I")
        self.reason: FinishReason | None = None
        self._prompt_tokens = prompt_tokens
        self._sampling = sampling
        self._stop_ids = frozenset((*sampling.stop_ids, *(() if sampling.ignore_eos else eos_ids)))
        self._text = Detokenizer(tokenizer)
        self._stops = StopFilter(sampling.stop_strings)
        self._tell_ids = tell_ids
        self._flushed = False

    @property
    def stop_string(self) -> str:
        """The stop string that ended it, or empty."""
        return self._stops.hit

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return self._prompt_tokens + len(self.output)

    def prime(self, output_ids: TokenArray) -> None:
        """Take in tokens that the client has already; their text is not released again."""
        for token in output_ids:
            self._advance(token)

    def take(self, span: TokenSpan, *, attempt: int) -> Delta | None:
        """Take in tokens of an attempt; return what the client gets of it, None for nothing.

        Tokens that are there already, those of earlier attempts, and those past the end are dropped.

        Raises:
            PeerLost: tokens are missing before these; the attempt cannot go on.
        """
        if span.attempt < attempt:
            return None
        if span.attempt > attempt or span.position > self.position:
            raise PeerLost(f"tokens from position {span.position} came where {self.position} was next")
        position = self.position
        skip = position - span.position
        text: list[str] = []
        taken = skip
        while taken < len(span.ids) and self.reason is None:
            text.append(self._advance(span.ids[taken]))
            taken += 1
        if self.reason is not None:
            text.append(self.flush())
        return self._delta("".join(text), position, span.ids[skip:taken], span.logprobs[skip:taken])

    def flush(self) -> str:
        """Return the text that was held back, once: no more tokens come."""
        if self._flushed:
            return ""
        self._flushed = True
        return self._stops.feed(self._text.finish()) + self._stops.finish()

    def _advance(self, token: int) -> str:
        """Take one token in; return the text that may be shown."""
        self.output.append(token)
        if token in self._stop_ids and len(self.output) > self._sampling.min_tokens:
            self.reason = FinishReason.STOP
            return ""
        text = self._stops.feed(self._text.feed([token]))
        if self._stops.hit:
            self.reason = FinishReason.STOP
        elif self._sampling.max_tokens is not None and len(self.output) >= self._sampling.max_tokens:
            self.reason = FinishReason.LENGTH
        return text

    def _delta(
        self, text: str, position: int, ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> Delta | None:
        if self._tell_ids and ids:
            return Delta(text=text, position=position, ids=ids, logprobs=logprobs)
        return Delta(text=text) if text else None
