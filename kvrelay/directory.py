"""Values that registry, routers and replicas exchange about membership, blocks and booked load. No I/O."""

import enum
from dataclasses import dataclass
from typing import TypeAlias

from kvrelay.types import Peer, Replica, ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One side of a pair with its price and its cap; a cap of 0 means none. Units as `Leg` in kv_registry.proto."""

    peer: Peer
    prefill_s: float = 0.0
    tokens: int = 0
    sequences: int = 0
    cap_prefill_s: float = 0.0
    cap_tokens: int = 0
    cap_sequences: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Where the answer is written, and where the prompt is read (None: at the decode replica)."""

    decode: Leg
    prefill: Leg | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Load to book: the first of the ranked pairs that fits. `inflight_key`: first block key nobody holds, or empty."""

    request_id: str
    attempt: int
    pairs: tuple[Pair, ...]
    ttl_s: float
    inflight_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Booked:
    """Index of the pair taken, -1 for none; replica that already computes the in-flight key, or empty."""

    pair: int
    inflight_replica_id: str = ""


class SettleAction(enum.StrEnum):
    """What to do with booked legs; meanings as `Settlement.Action` in kv_registry.proto."""

    RENEW = "renew"
    END_PREFILL = "end_prefill"
    END = "end"
    MOVE_PREFILL = "move_prefill"
    REBOOK = "rebook"
    CLEAR_INFLIGHT = "clear_inflight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """A change to booked legs."""

    action: SettleAction
    request_id: str
    attempt: int
    ttl_s: float = 0.0
    pair: Pair | None = None
    inflight_key: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBatch:
    """A change of a replica's block set; `count` and `xor` describe the set after it."""

    seq: int
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    cleared: bool = False
    count: int = 0
    xor: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the registry wants after a heartbeat or a batch."""

    register_again: bool = False
    snapshot_wanted: bool = False


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget everything; a snapshot follows."""


@dataclass(frozen=True, slots=True)
class ReplicaSeen:
    """A replica appeared, came back or changed."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class ReplicaGone:
    """A replica went; `reason` is "expired", "replaced" or "deregistered"."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaBeat:
    """A replica's state."""

    peer: Peer
    state: ReplicaState


@dataclass(frozen=True, slots=True)
class BlocksSeen:
    """A replica's blocks changed."""

    peer: Peer
    batch: BlockBatch


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The watcher has caught up."""


WatchEvent: TypeAlias = Reset | ReplicaSeen | ReplicaGone | ReplicaBeat | BlocksSeen | CaughtUp


@dataclass(frozen=True, slots=True)
class Watched:
    """An event and the opaque position after it."""

    position: str
    event: WatchEvent
