"""Drives a runner by hand, without scheduler: one sequence or several, in chunks and batches as told."""

import array
from dataclasses import dataclass, field
from itertools import count

from kvrelay.engine.runner import Draw, Drawn, Runner, Slice
from kvrelay.types import Sampling

WHOLE = 1 << 30
"""A chunk that holds any prompt."""


@dataclass
class Sequence:
    """Tokens of one sequence and the pages that hold their KV."""

    ids: array.array
    pages: array.array
    sampling: Sampling = field(default_factory=Sampling)
    computed: int = 0
    drawn: list[Drawn] = field(default_factory=list)

    @property
    def written(self) -> list[int]:
        return [drawn.token for drawn in self.drawn]

    def slice(self, chunk: int = WHOLE) -> Slice:
        length = min(chunk, len(self.ids) - self.computed)
        ends = self.computed + length == len(self.ids)
        draw = Draw(self.sampling, position=len(self.ids)) if ends else None
        return Slice(self.ids, self.computed, length, self.pages, draw)

    def take(self, part: Slice, drawn: Drawn | None) -> None:
        assert (drawn is None) == (part.draw is None)
        self.computed = part.start + part.length
        if drawn is not None:
            self.drawn.append(drawn)
            self.ids.append(drawn.token)


class Pages:
    """Hands out pages in an order that leaves no two of a sequence side by side."""

    def __init__(self, total: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._order = (page * 7 % total if total % 7 else page for page in count())
        self._left = total

    def sequence(self, prompt: list[int], room: int, sampling: Sampling | None = None) -> Sequence:
        needed = -(-(len(prompt) + room) // self._page_tokens)
        self._left -= needed
        assert self._left >= 0, "the test's pool is too small"
        pages = array.array("I", [next(self._order) for _ in range(needed)])
        return Sequence(array.array("I", prompt), pages, sampling or Sampling())


def step(runner: Runner, sequences: list[Sequence], chunk: int = WHOLE) -> None:
    """Compute one batch: the next chunk or token of every sequence."""
    batch = [sequence.slice(chunk) for sequence in sequences]
    for sequence, part, drawn in zip(sequences, batch, runner.run(batch), strict=True):
        sequence.take(part, drawn)


def write(runner: Runner, sequences: list[Sequence], tokens: int, chunk: int = WHOLE) -> list[list[int]]:
    """Compute batches of all unfinished sequences until each has written `tokens`; returns what each wrote."""
    while unfinished := [sequence for sequence in sequences if len(sequence.drawn) < tokens]:
        step(runner, unfinished, chunk)
    return [sequence.written for sequence in sequences]
