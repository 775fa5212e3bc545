"""What the engine core asks of the thing that computes: one boundary for real and mock models.

The core (scheduler, pool, prefix cache, leases, pulls) is free of torch. A `Runner` owns weights and the memory of the
KV pool; it is used from the engine thread only.
"""

import array
from dataclasses import dataclass
from typing import Protocol

from kvrelay.types import KvLayout, Sampling, TokenArray, TokenLogprobs


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The KV pool's memory: `pages` pages of `page_bytes`, page i at base_address + i * page_bytes; prefaulted."""

    base_address: int
    pages: int
    page_bytes: int
    memory: str = "DRAM"
    device_id: int = 0


@dataclass(slots=True)
class Draw:
    """How the token after a slice is chosen.

    Attributes:
        sampling: parameters; `seed` is set.
        position: absolute position of the token to be chosen; key of the random numbers with `seed`.
        min_tokens_left: stop ids are masked while positive.
        stop_ids: all ids that end the answer (the model's own too, unless ignored).
    """

    sampling: Sampling
    position: int
    min_tokens_left: int = 0
    stop_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class Slice:
    """One (sequence, chunk) pair of a batch.

    `ids` and `pages` are the engine's own and grow in place: a runner keeps no view of their memory after `run`.

    Attributes:
        ids: all tokens of the sequence so far; positions [start, start + length) are computed now.
        start: tokens whose KV is already in the pages.
        length: tokens to compute, at least 1.
        pages: block table, covers at least start + length tokens.
        draw: how to choose the next token; None when the chunk does not reach the sequence's end.
    """

    ids: TokenArray
    start: int
    length: int
    pages: "array.array[int]"
    draw: Draw | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token chosen after a slice."""

    token: int
    logprobs: TokenLogprobs | None = None


class Runner(Protocol):
    """Computes batches over a paged KV pool."""

    layout: KvLayout
    model_fingerprint: str
    tokenizer_fingerprint: str
    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]

    def allocate(self, pages: int) -> KvMemory:
        """Allocate and prefault the pool; called once, before `run`."""
        ...

    def run(self, batch: list[Slice]) -> list[Drawn | None]:
        """Compute the slices, write their KV into their pages, and choose next tokens.

        Returns one entry a slice, in order: None where `draw` is None.

        Raises:
            KvrelayError: the whole batch failed and nothing may be used of it.
        """
        ...

    def close(self) -> None:
        """Free the pool and the weights."""
        ...
