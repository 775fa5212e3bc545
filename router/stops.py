"""Finds the texts that end an answer, and keeps every part of them from the client."""

from collections.abc import Sequence


class StopFilter:
    """Passes text on until a stop string is complete.

    The first stop string to be *completed* ends the answer (of two completed at once, the longer). So the result does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = ""
        """The stop string that was found, or empty."""

    def feed(self, text: str) -> str:
        """Take new text; return what may be shown now. After a hit, nothing more may be."""
        if self.hit:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back: the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
