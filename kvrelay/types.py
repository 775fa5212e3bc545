"""Values that every part of kvrelay speaks of. No I/O, no torch, no grpc."""

import array
import enum
import math
import sys
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvrelay.errors import InvalidArgument

TokenArray: TypeAlias = "array.array[int]"

KEY_BYTES = 16
"""Bytes in a block key: SHA-256 cut to 128 bits."""

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
KEY_VERSION = 1
PAGE_AXES = "layer,kv,head,token,dim"

LOGPROBS_MAX = 20
STOP_STRINGS_MAX = 16


class Role(enum.StrEnum):
    """What a replica does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        """True when it takes `Prefill.Start`."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """True when it takes `Decode.Generate`."""
        return self is not Role.PREFILL


class FinishReason(enum.StrEnum):
    """Why an answer ended. Failures are errors, never a finish reason."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"


def pack_ids(ids: "TokenArray | list[int] | tuple[int, ...]") -> bytes:
    """Pack token ids as little-endian u32, 4 bytes a token."""
    packed = ids if isinstance(ids, array.array) else array.array("I", ids)
    if sys.byteorder == "big":  # pragma: no cover
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes, *, name: str = "ids") -> TokenArray:
    """Unpack token ids.

    Raises:
        InvalidArgument: the length is not a multiple of 4 bytes.
    """
    if len(data) % 4:
        raise InvalidArgument(name, f"{len(data)} bytes is not a whole number of 4-byte token ids")
    ids = array.array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    return ids


def split_keys(data: bytes, *, name: str = "keys") -> list[bytes]:
    """Split packed block keys.

    Raises:
        InvalidArgument: the length is not a multiple of 16 bytes.
    """
    if len(data) % KEY_BYTES:
        raise InvalidArgument(name, f"{len(data)} bytes is not a whole number of {KEY_BYTES}-byte keys")
    return [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Defaults are those of the protocol (`Sampling` in common.proto).

    Attributes:
        temperature: 0 is greedy; [0, 2].
        top_k: most likely tokens kept; 0 keeps all.
        top_p: probability mass kept; (0, 1].
        min_p: tokens less likely than this times the best are dropped; [0, 1].
        seed: key of the counter-based random numbers, u64; None until a router draws one.
        max_tokens: most tokens to write; None: what the context leaves.
        min_tokens: tokens written before a stop id counts.
        stop_ids: token ids that end the answer beside the model's own.
        stop_strings: texts that end the answer; known to routers only.
        ignore_eos: the model's own end ids are ordinary tokens.
        logprobs: None for none, else how many of the most likely tokens to tell beside the chosen one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def validate(self) -> None:
        """Check every field against its limits.

        Raises:
            InvalidArgument: names the first field that is out of range, and the limit.
        """
        _in_range("sampling.temperature", self.temperature, low=0.0, high=2.0)
        _in_range("sampling.top_k", self.top_k, low=0, high=2**31 - 1)
        _in_range("sampling.top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _in_range("sampling.min_p", self.min_p, low=0.0, high=1.0)
        if self.max_tokens is not None:
            _in_range("sampling.max_tokens", self.max_tokens, low=1, high=2**31 - 1)
        _in_range("sampling.min_tokens", self.min_tokens, low=0, high=self.max_tokens or 2**31 - 1)
        if self.seed is not None:
            _in_range("sampling.seed", self.seed, low=0, high=2**64 - 1)
        if self.logprobs is not None:
            _in_range("sampling.logprobs", self.logprobs, low=0, high=LOGPROBS_MAX)
        if len(self.stop_strings) > STOP_STRINGS_MAX:
            raise InvalidArgument(
                "sampling.stop_strings", f"{len(self.stop_strings)} given, at most {STOP_STRINGS_MAX}"
            )
        if any(not text for text in self.stop_strings):
            raise InvalidArgument("sampling.stop_strings", "a stop string must not be empty")

    def limited(self, prompt_tokens: int, context_tokens: int) -> "Sampling":
        """Return the same with `max_tokens` cut to what the context leaves after the prompt."""
        left = context_tokens - prompt_tokens
        return replace(self, max_tokens=left if self.max_tokens is None else min(self.max_tokens, left))


def _in_range(name: str, value: float, *, low: float, high: float, open_low: bool = False) -> None:
    bracket = "(" if open_low else "["
    inside = low < value <= high if open_low else low <= value <= high
    if not math.isfinite(value) or not inside:
        raise InvalidArgument(name, f"{value} is not in {bracket}{low:g}, {high:g}]")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm, before temperature and filters) of one token."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape of a KV pool; both ends of a pull need the same one."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_tokens: int
    block_tokens: int
    page_bytes: int
    axes: str = PAGE_AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What must agree before two processes may share blocks."""

    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    block_tokens: int
    context_tokens: int
    golden_keys: bytes
    key_version: int = KEY_VERSION
    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR


@dataclass(frozen=True, slots=True)
class Peer:
    """A running replica: stable id, random id of this start, advertised host:port."""

    replica_id: str
    incarnation: str
    address: str


@dataclass(frozen=True, slots=True)
class Holder:
    """A replica that holds the first `blocks` blocks of a prompt, in a tier: "device", "host" or "disk"."""

    peer: Peer
    blocks: int
    tier: str = "device"


@dataclass(slots=True, kw_only=True)
class Usage:
    """What a request cost; fields as `Usage` in common.proto."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    pulled_tokens: int = 0
    computed_tokens: int = 0
    prefill_cached_tokens: int = 0
    output_tokens: int = 0
    pulled_bytes: int = 0
    pull_s: float = 0.0
    pull_descriptors: int = 0
    decode_computed_tokens: int = 0
    prefill_pulled_tokens: int = 0
    prefill_pulled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """State of a replica's engine, told with each heartbeat; fields as `ReplicaState` in kv_registry.proto."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    pages_free: int = 0
    pages_total: int = 0
    pages_quarantined: int = 0
    leases: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    draining: bool = False
    ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica's entry in the registry."""

    peer: Peer
    role: Role
    identity: ModelIdentity
    layout: KvLayout
    pages: int
    max_sequences: int
    weight: float = 1.0
    epoch: int = 0
    draining: bool = False
    state: ReplicaState = field(default_factory=ReplicaState)
