"""What policies decide on, and what they return."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeAlias

from kvrelay.types import Peer, Role


class Disaggregate(enum.StrEnum):
    """Where prompts are read, as `--disaggregate` gives it: by the decider, always remotely, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


TOKENS_PER_SEQUENCE: Final = 512
"""KV tokens that cost a decode step about as much as one more sequence does (attention over them against the rows added
to each matrix product). It makes sequences and tokens one load: neither many short nor few long ones pile up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Booked work of a replica: predicted prefill time in s, KV tokens and sequences to decode."""

    prefill_s: float = 0.0
    tokens: int = 0
    sequences: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            prefill_s=self.prefill_s + other.prefill_s,
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
        )

    @property
    def decode(self) -> float:
        """Decode work in sequences, long contexts counting as several."""
        return self.sequences + self.tokens / TOKENS_PER_SEQUENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that may take one side of a request.

    Attributes:
        peer: who.
        role: what it does.
        held_tokens: tokens of this prompt whose KV it holds.
        load: work booked at it, this request not included.
        weight: relative capacity.
        max_sequences: sequences it decodes at once.
        prefill_tokens_per_s: predicted prefill speed.
        step_s: predicted time of a decode step, s.
        kv_bytes_per_token: size of a token's KV.
    """

    peer: Peer
    role: Role
    held_tokens: int = 0
    load: Load = Load()
    weight: float = 1.0
    max_sequences: int = 32
    prefill_tokens_per_s: float
    step_s: float
    kv_bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidates:
    """All replicas that may serve a request: those that decode and those that prefill (a `both` is in both)."""

    decoders: tuple[Candidate, ...]
    prefills: tuple[Candidate, ...]

    def readers(self) -> tuple[Candidate, ...]:
        """Return those to ask for remote prefill: dedicated ones, else the aggregated."""
        dedicated = tuple(c for c in self.prefills if c.role is Role.PREFILL)
        return dedicated or self.prefills

    def everyone(self) -> tuple[Candidate, ...]:
        """Return each replica once."""
        return tuple({c.peer.replica_id: c for c in (*self.decoders, *self.prefills)}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a policy must know of a request.

    Attributes:
        prompt_tokens: tokens to have in KV before decoding starts (output so far included).
        output_tokens: tokens expected to be written.
        disaggregate: where prompts are read.
        epsilon: how far over the mean load a replica may be, as a share of it.
        turn: number of this request at this router.
    """

    prompt_tokens: int
    output_tokens: int
    disaggregate: Disaggregate = Disaggregate.AUTO
    epsilon: float = 0.25
    turn: int = 0

    @property
    def load(self) -> Load:
        """What decoding this request adds to a replica."""
        return Load(tokens=self.prompt_tokens + self.output_tokens, sequences=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Predicted cost of a pair, by part, in s."""

    queue_s: float
    compute_s: float
    pull_s: float = 0.0
    harm_s: float = 0.0
    decode_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """What the request itself waits."""
        return self.queue_s + self.compute_s + self.pull_s + self.decode_s

    @property
    def total_s(self) -> float:
        """The same plus the harm to running streams."""
        return self.alone_s + self.harm_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A pair: where the answer is written, and where the prompt is read (None: at the decode replica).

    Attributes:
        decode: the decode replica.
        prefill: the prefill replica, or None.
        cost: predicted cost.
        rival: cost of the other way (local against the best remote), when there is one.
        reason: one word for why this pair; see README.md.
        decider_reason: one word for why remote or local.
        holder: replica that holds more of the prefix than the one that reads it, worth pulling from.
        capped: the load cap was checked, and is to be held when the pair is booked.
    """

    decode: Candidate
    prefill: Candidate | None
    cost: Cost
    rival: Cost | None = None
    reason: str = ""
    decider_reason: str = ""
    holder: Candidate | None = None
    capped: bool = False

    @property
    def reader(self) -> Candidate:
        """The replica that reads the prompt."""
        return self.prefill or self.decode

    def because(self, reason: str) -> "Choice":
        """Return the same with its reason."""
        return replace(self, reason=reason)


Policy: TypeAlias = Callable[[Ask, Candidates, Random], list[Choice]]
"""Returns pairs, the chosen one first, then what to try when it does not work out. Empty: nobody can."""

RANKED_MAX: Final = 8
"""Pairs a policy returns: enough to survive several losses, few enough to travel in one reservation."""
