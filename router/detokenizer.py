"""Token ids to text, piece by piece, without ever showing half a character."""

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

BROKEN: Final = "\ufffd"
"""What a decoder shows for bytes that are no whole character (yet)."""

PENDING_TOKENS_MAX: Final = 256
"""Tokens held in one window. A character has at most 4 bytes, so only a model that writes broken bytes without end
gets here; then its text is taken as it is, and the cost of decoding a window stays bounded."""


class Detokenizer:
    """Releases the text of one answer as soon as it can no longer change.

    The whole text of some ids is not the sum of their texts: characters span tokens, and some decoders treat the first
    token of a text differently. So a window is decoded: tokens whose text is out already (for context), then those
    whose text is not, or not all, out. The difference to the text of the former is new.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._settled = 0  # tokens at the front of the window whose text is all out
        self._out = 0  # characters of the window's text that are out

    def feed(self, ids: Sequence[int]) -> str:
        """Take new tokens; return the text that is final now, possibly empty."""
        self._window.extend(ids)
        text = self._decode(self._window)
        if text.endswith(BROKEN) and len(self._window) - self._settled <= PENDING_TOKENS_MAX:
            return self._release(text, len(text.rstrip(BROKEN)))
        new = self._release(text, len(text))
        self._slide()
        return new

    def finish(self) -> str:
        """Return what was held back: no more tokens come, so broken bytes stay broken."""
        text = self._decode(self._window)
        return self._release(text, len(text))

    def _release(self, text: str, end: int) -> str:
        new = text[self._out : end]
        self._out = max(self._out, end)
        return new

    def _slide(self) -> None:
        """Keep only the newest tokens as context, provided that they show any text."""
        recent = self._window[self._settled :]
        shown = self._decode(recent)
        if shown:
            self._window = recent
            self._out = len(shown)
        self._settled = len(self._window)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
