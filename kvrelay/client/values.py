"""What clients give and get: small immutable values, no generated code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias, TypedDict

from kvrelay.types import FinishReason, Peer, Role, Sampling, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Slo:
    """What the client calls good service, in ms; None is no promise."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Options(TypedDict, total=False):
    """Keywords of a request. Fields of `Sampling` may be given one by one, or whole as `sampling`.

    Keys:
        deadline_s: seconds until the whole answer must be there; default: the client's.
        model: alias; default: the only model served.
        session: requests of one session go to one replica where the load allows.
        priority: higher first, [-100, 100].
        tenant: who pays, where no credential says so.
        slo: what the client calls good service.
        request_id: drawn by the router when absent.
        return_ids: token ids beside the text.
        cache_salt: prompts share cached blocks only under the same salt.
        sampling: how tokens are chosen; the other keys are its fields.
    """

    deadline_s: float
    model: str
    session: str
    priority: int
    tenant: str
    slo: Slo
    request_id: str
    return_ids: bool
    cache_salt: str
    sampling: Sampling
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    ignore_eos: bool
    logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes, and why: the first part; another one later means that a new attempt began.

    Attributes:
        decode: replica that writes the answer.
        prefill: replica that reads the prompt; None: the decode replica does.
        reason: one word for why this pair.
        decider_reason: one word for why the prompt is read remotely or locally.
        available_tokens: prompt tokens cached somewhere in the fleet.
        inputs: numbers the decision rests on, by name with unit.
        queue_s: time spent in the router's queue.
        text: always empty, so that the texts of all parts can be joined.
    """

    request_id: str
    attempt: int
    model: str
    decode: Peer | None
    prefill: Peer | None
    reason: str
    decider_reason: str
    policy: str
    prompt_tokens: int
    available_tokens: int
    prefill_cached_tokens: int
    decode_cached_tokens: int
    seed: int
    queue_s: float
    holder: Peer | None
    inputs: Mapping[str, float] = field(default_factory=dict)
    text: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text: whole characters, nothing of a stop string. `ids` and `logprobs` only where they were asked for."""

    text: str
    choice: int = 0
    position: int = 0
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end: the last part.

    Attributes:
        ttft_s: time to first token as the router saw it.
        tpot_s: mean time per output token after the first as the router saw it.
        prefill: replica that really read the prompt, after alternates; None: the decode replica did.
        prefill_reason: one word for why that moved, if it did.
        text: always empty, so that the texts of all parts can be joined.
    """

    reason: FinishReason
    usage: Usage
    choice: int = 0
    stop_string: str = ""
    attempts: int = 1
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    prefill: Peer | None = None
    prefill_reason: str = ""
    text: ClassVar[str] = ""


Part: TypeAlias = Decision | Delta | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer: the text of all deltas, the last decision, the finish."""

    text: str
    decision: Decision
    finish: Finish
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def usage(self) -> Usage:
        """What the answer cost."""
        return self.finish.usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A replica as a router sees it; fields and units as `ReplicaStatus` in router.proto."""

    peer: Peer
    role: Role
    model: str
    state: str
    prefill_load_s: float
    decode_sequences: int
    decode_tokens: int
    blocks: int
    pages_total: int
    pages_free: int
    pages_quarantined: int
    leases: int
    running: int
    waiting: int
    steps: int
    heartbeat_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The fleet as a router sees it; `state` is "ready", "degraded" (registry or Redis away) or "starting"."""

    state: str
    policy: str
    disaggregate: str
    block_tokens: int
    replicas: tuple[ReplicaStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that is served; `context_tokens` is its longest sequence, prompt and output."""

    model: str
    context_tokens: int
    model_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """Token ids of a prompt and the keys of its full blocks."""

    ids: tuple[int, ...]
    block_keys: tuple[bytes, ...]
