"""What an attempt takes and what it tells. No I/O."""

import enum
from dataclasses import dataclass
from typing import TypeAlias

from kvrelay.engine.protocol import Prompt
from kvrelay.types import FinishReason, Holder, Peer, Sampling, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Target:
    """A prefill replica to ask, and who holds more of the prefix than it does."""

    peer: Peer
    holder: Holder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One attempt of a request, checked; fields as `DecodeGenerateRequest` in decode.proto."""

    request_id: str
    attempt: int
    prompt: Prompt
    sampling: Sampling
    forced_next: int | None
    targets: tuple[Target, ...]
    holder: Holder | None
    priority: int
    never_local: bool


class LegState(enum.StrEnum):
    """What happened to the prefill leg; meanings as `PrefillLeg.State` in decode.proto."""

    STARTED = "started"
    READY = "ready"
    FAILED = "failed"
    LOCAL = "local"
    PULLED = "pulled"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is in; `held_tokens` of its prompt are held here."""

    held_tokens: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """New tokens; `position` is the absolute position of the first."""

    position: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class LegMoved:
    """The prefill leg changed; `reason` is one word, for FAILED and LOCAL."""

    state: LegState
    peer: Peer | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer ended; the last reply."""

    reason: FinishReason
    usage: Usage
    stop_id: int | None = None


Reply: TypeAlias = Accepted | Wrote | LegMoved | Finished
