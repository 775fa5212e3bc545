"""A sequence of tokens, the pages that hold its KV, and the names of its blocks."""

import array
from dataclasses import dataclass, field

from kvrelay.types import FinishReason, TokenArray


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens and where their KV lies.

    Who owns which tokens of `ids`:

        [0, named * page_tokens)      final, in pages that the prefix cache was offered
        [.., computed)                final, in pages that are this sequence's alone
        [computed, len(ids))          to be computed
        pages                         cover [0, len(pages) * page_tokens); `reserved` more are set aside for it

    Attributes:
        ids: all tokens known.
        prompt_tokens: how many of them are the client's prompt; the others are output.
        root_key: root of the key chain.
        keys: keys of the full blocks, as far as they are known.
        pages: block table.
        reserved: pages set aside in the pool and not yet allocated.
        computed: tokens whose KV is final.
        named: pages that were offered to the prefix cache.
        leased_from: first index in `pages` under the sequence's own lease; None when it leases nothing.
    """

    ids: TokenArray
    prompt_tokens: int
    root_key: bytes
    keys: list[bytes]
    pages: "array.array[int]" = field(default_factory=lambda: array.array("i"))
    reserved: int = 0
    computed: int = 0
    named: int = 0
    leased_from: int | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.ids) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute until the end."""
        return len(self.ids) - self.computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a sequence ends.

    Attributes:
        max_tokens: most output tokens; None: what the context leaves.
        min_tokens: output tokens before a stop id counts.
        context_tokens: longest sequence.
        stop_ids: ids that end it.
    """

    max_tokens: int | None
    min_tokens: int
    context_tokens: int
    stop_ids: frozenset[int]

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Tell whether the newest output token ends the sequence, and why."""
        written = sequence.output_tokens
        if written > self.min_tokens and sequence.ids[-1] in self.stop_ids:
            return FinishReason.STOP
        if self.max_tokens is not None and written >= self.max_tokens:
            return FinishReason.LENGTH
        if len(sequence.ids) >= self.context_tokens:
            return FinishReason.CONTEXT
        return None

    def most_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens whose KV is needed the sequence may reach; the last token's KV never is."""
        if self.max_tokens is None:
            return self.context_tokens - 1
        return min(prompt_tokens + self.max_tokens, self.context_tokens) - 1
