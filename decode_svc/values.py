"""What an attempt takes and what it tells. No I/O."""

from dataclasses import dataclass
from typing import TypeAlias

from kvrelay.decode_events import Accepted, Finished, LegMoved
from kvrelay.engine.protocol import Prompt
from kvrelay.types import Holder, Peer, Sampling, TokenLogprobs


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


@dataclass(frozen=True, slots=True)
class Wrote:
    """New tokens; `position` is the absolute position of the first."""

    position: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


Reply: TypeAlias = Accepted | Wrote | LegMoved | Finished
