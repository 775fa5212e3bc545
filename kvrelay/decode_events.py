"""Values that a decode replica tells its router about an attempt; both ends of `Decode.Generate` use them. No I/O."""

import enum
from dataclasses import dataclass

from kvrelay.types import FinishReason, Peer, Usage


class LegState(enum.StrEnum):
    """What happened to the prefill leg; meanings as `PrefillLeg.State` in decode.proto."""

    STARTED = "started"
    READY = "ready"
    FAILED = "failed"
    LOCAL = "local"
    PULLED = "pulled"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is in; `held_tokens` of its prompt are held at the decode replica."""

    held_tokens: int


@dataclass(frozen=True, slots=True)
class LegMoved:
    """The prefill leg changed; `reason` is one word, for FAILED and LOCAL."""

    state: LegState
    peer: Peer | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer ended; the last event."""

    reason: FinishReason
    usage: Usage
    stop_id: int | None = None
