"""Conversions between `kvrelay.directory` and kv_registry.proto. Pure; the rest is in `kvrelay.rpc.convert`."""

import math
from collections.abc import Callable
from typing import Final

from kvrelay.directory import (
    BlockBatch,
    BlocksSeen,
    Booked,
    CaughtUp,
    Leg,
    Pair,
    ReplicaBeat,
    ReplicaGone,
    ReplicaSeen,
    Reservation,
    Reset,
    SettleAction,
    Settlement,
    Watched,
    WatchEvent,
)
from kvrelay.errors import InvalidArgument
from kvrelay.rpc import convert
from kvrelay.types import KEY_BYTES, ModelIdentity, Peer, Replica, ReplicaState, split_keys
from kvrelay.v1 import common_pb2, kv_registry_pb2

PREFILL_S_MAX: Final = 1e6
"""Longer than any prompt takes; keeps sums of many legs, in µs, exact in the store's 53-bit numbers."""

TOKENS_MAX: Final = 1 << 40
"""More than any fleet holds, for the same reason."""

_ACTIONS: Final = {
    SettleAction.RENEW: kv_registry_pb2.Settlement.ACTION_RENEW,
    SettleAction.END_PREFILL: kv_registry_pb2.Settlement.ACTION_END_PREFILL,
    SettleAction.END: kv_registry_pb2.Settlement.ACTION_END,
    SettleAction.MOVE_PREFILL: kv_registry_pb2.Settlement.ACTION_MOVE_PREFILL,
    SettleAction.REBOOK: kv_registry_pb2.Settlement.ACTION_REBOOK,
    SettleAction.CLEAR_INFLIGHT: kv_registry_pb2.Settlement.ACTION_CLEAR_INFLIGHT,
}
_ACTIONS_BACK: Final = {number: action for action, number in _ACTIONS.items()}


def pack_replica(replica: Replica) -> bytes:
    """Return a replica's entry as the registry keeps it."""
    return convert.replica_to_pb(replica).SerializeToString()


def unpack_replica(data: bytes, *, epoch: int) -> Replica:
    """Return the replica of a kept entry, with the epoch of its registration."""
    pb = kv_registry_pb2.Replica.FromString(data)
    pb.epoch = epoch
    return convert.replica_from_pb(pb)


def pack_identity(identity: ModelIdentity) -> bytes:
    """Return an identity as the registry keeps it."""
    return convert.identity_to_pb(identity).SerializeToString()


def unpack_identity(data: bytes) -> ModelIdentity:
    """Return a kept identity."""
    return convert.identity_from_pb(common_pb2.ModelIdentity.FromString(data))


def pack_peer(peer: Peer) -> bytes:
    """Return a peer as the registry keeps it."""
    return convert.peer_to_pb(peer).SerializeToString()


def unpack_peer(data: bytes) -> Peer:
    """Return a kept peer."""
    return convert.peer_from_pb(common_pb2.Peer.FromString(data))


def pack_beat(peer: Peer, state: ReplicaState) -> bytes:
    """Return a replica's state as the registry keeps it."""
    return _beat_to_pb(ReplicaBeat(peer, state)).SerializeToString()


def unpack_beat(data: bytes) -> ReplicaBeat:
    """Return a kept state."""
    return _beat_from_pb(kv_registry_pb2.ReplicaBeat.FromString(data))


def batch_from_pb(pb: kv_registry_pb2.PublishBlocksRequest) -> BlockBatch:
    """Return a batch of block changes.

    Raises:
        InvalidArgument: keys or XOR have a wrong length.
    """
    if len(pb.xor) != KEY_BYTES:
        raise InvalidArgument("xor", f"{len(pb.xor)} bytes, expected {KEY_BYTES}")
    return BlockBatch(
        seq=pb.seq,
        added=tuple(split_keys(pb.added_keys, name="added_keys")),
        removed=tuple(split_keys(pb.removed_keys, name="removed_keys")),
        cleared=pb.cleared,
        count=pb.count,
        xor=pb.xor,
    )


def batch_to_pb(peer: Peer, *, model: str, epoch: int, batch: BlockBatch) -> kv_registry_pb2.PublishBlocksRequest:
    """Return the request that publishes a batch."""
    return kv_registry_pb2.PublishBlocksRequest(
        peer=convert.peer_to_pb(peer),
        model=model,
        epoch=epoch,
        seq=batch.seq,
        added_keys=b"".join(batch.added),
        removed_keys=b"".join(batch.removed),
        cleared=batch.cleared,
        count=batch.count,
        xor=batch.xor,
        tier=common_pb2.TIER_DEVICE,
    )


def leg_to_pb(leg: Leg) -> kv_registry_pb2.Leg:
    """Return the wire's leg."""
    return kv_registry_pb2.Leg(
        peer=convert.peer_to_pb(leg.peer),
        prefill_s=leg.prefill_s,
        tokens=leg.tokens,
        sequences=leg.sequences,
        cap_prefill_s=leg.cap_prefill_s,
        cap_tokens=leg.cap_tokens,
        cap_sequences=leg.cap_sequences,
    )


def leg_from_pb(pb: kv_registry_pb2.Leg, *, name: str) -> Leg:
    """Return a leg.

    Raises:
        InvalidArgument: a number is not finite, negative, or absurdly large.
    """
    for field in ("prefill_s", "cap_prefill_s"):
        _check_number(f"{name}.{field}", getattr(pb, field), PREFILL_S_MAX)
    for field in ("tokens", "cap_tokens"):
        _check_number(f"{name}.{field}", getattr(pb, field), TOKENS_MAX)
    return Leg(
        peer=convert.peer_from_pb(pb.peer, name=f"{name}.peer"),
        prefill_s=pb.prefill_s,
        tokens=pb.tokens,
        sequences=pb.sequences,
        cap_prefill_s=pb.cap_prefill_s,
        cap_tokens=pb.cap_tokens,
        cap_sequences=pb.cap_sequences,
    )


def _check_number(name: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise InvalidArgument(name, f"{value} is not in [0, {most:g}]")


def pair_to_pb(pair: Pair) -> kv_registry_pb2.Pair:
    """Return the wire's pair."""
    prefill = None if pair.prefill is None else leg_to_pb(pair.prefill)
    return kv_registry_pb2.Pair(decode=leg_to_pb(pair.decode), prefill=prefill)


def pair_from_pb(pb: kv_registry_pb2.Pair, *, name: str) -> Pair:
    """Return a pair.

    Raises:
        InvalidArgument: a leg makes no sense.
    """
    prefill = leg_from_pb(pb.prefill, name=f"{name}.prefill") if pb.HasField("prefill") else None
    return Pair(leg_from_pb(pb.decode, name=f"{name}.decode"), prefill)


def reservation_to_pb(reservation: Reservation) -> kv_registry_pb2.Reservation:
    """Return the wire's reservation."""
    return kv_registry_pb2.Reservation(
        request_id=reservation.request_id,
        attempt=reservation.attempt,
        pairs=[pair_to_pb(pair) for pair in reservation.pairs],
        inflight_key=reservation.inflight_key,
        ttl_s=reservation.ttl_s,
    )


def reservation_from_pb(pb: kv_registry_pb2.Reservation) -> Reservation:
    """Return a reservation.

    Raises:
        InvalidArgument: a pair or the in-flight key makes no sense.
    """
    _check_inflight_key("reservations.inflight_key", pb.inflight_key)
    return Reservation(
        request_id=pb.request_id,
        attempt=pb.attempt,
        pairs=tuple(pair_from_pb(pair, name="reservations.pairs") for pair in pb.pairs),
        ttl_s=pb.ttl_s,
        inflight_key=pb.inflight_key,
    )


def _check_inflight_key(name: str, key: bytes) -> None:
    if len(key) not in {0, KEY_BYTES}:
        raise InvalidArgument(name, f"{len(key)} bytes, expected {KEY_BYTES} or none")


def settlement_to_pb(settlement: Settlement) -> kv_registry_pb2.Settlement:
    """Return the wire's settlement."""
    return kv_registry_pb2.Settlement(
        action=_ACTIONS[settlement.action],
        request_id=settlement.request_id,
        attempt=settlement.attempt,
        ttl_s=settlement.ttl_s,
        pair=None if settlement.pair is None else pair_to_pb(settlement.pair),
        inflight_key=settlement.inflight_key,
    )


def settlement_from_pb(pb: kv_registry_pb2.Settlement) -> Settlement:
    """Return a settlement.

    Raises:
        InvalidArgument: the action is not known, or the pair or key makes no sense.
    """
    action = _ACTIONS_BACK.get(pb.action)
    if action is None:
        raise InvalidArgument("settlements.action", f"{pb.action} is not an action")
    _check_inflight_key("settlements.inflight_key", pb.inflight_key)
    return Settlement(
        action=action,
        request_id=pb.request_id,
        attempt=pb.attempt,
        ttl_s=pb.ttl_s,
        pair=pair_from_pb(pb.pair, name="settlements.pair") if pb.HasField("pair") else None,
        inflight_key=pb.inflight_key,
    )


def booked_to_pb(booked: Booked) -> kv_registry_pb2.Booked:
    """Return the wire's result of a reservation."""
    return kv_registry_pb2.Booked(pair=booked.pair, inflight_replica_id=booked.inflight_replica_id)


def booked_from_pb(pb: kv_registry_pb2.Booked) -> Booked:
    """Return the result of a reservation."""
    return Booked(pb.pair, pb.inflight_replica_id)


def watched_to_pb(watched: Watched) -> kv_registry_pb2.WatchResponse:
    """Return the wire's event."""
    pb = kv_registry_pb2.WatchResponse(position=watched.position)
    match watched.event:
        case Reset():
            pb.reset.SetInParent()
        case CaughtUp():
            pb.caught_up.SetInParent()
        case ReplicaSeen(replica):
            pb.replica.CopyFrom(convert.replica_to_pb(replica))
        case ReplicaGone(peer, reason):
            pb.gone.CopyFrom(kv_registry_pb2.ReplicaGone(peer=convert.peer_to_pb(peer), reason=reason))
        case ReplicaBeat() as beat:
            pb.beat.CopyFrom(_beat_to_pb(beat))
        case BlocksSeen(peer, batch):
            pb.blocks.CopyFrom(_blocks_to_pb(peer, batch))
    return pb


def watched_from_pb(pb: kv_registry_pb2.WatchResponse) -> Watched | None:
    """Return the event; None for a kind that a newer registry added."""
    event = _event_from_pb(pb)
    return None if event is None else Watched(pb.position, event)


def _event_from_pb(pb: kv_registry_pb2.WatchResponse) -> WatchEvent | None:
    kind = pb.WhichOneof("event")
    return None if kind is None else _EVENTS[kind](pb)


def _beat_to_pb(beat: ReplicaBeat) -> kv_registry_pb2.ReplicaBeat:
    return kv_registry_pb2.ReplicaBeat(
        peer=convert.peer_to_pb(beat.peer), state=convert.replica_state_to_pb(beat.state)
    )


def _beat_from_pb(pb: kv_registry_pb2.ReplicaBeat) -> ReplicaBeat:
    return ReplicaBeat(convert.peer_from_pb(pb.peer), convert.replica_state_from_pb(pb.state))


def _blocks_to_pb(peer: Peer, batch: BlockBatch) -> kv_registry_pb2.BlocksChanged:
    return kv_registry_pb2.BlocksChanged(
        peer=convert.peer_to_pb(peer),
        seq=batch.seq,
        added_keys=b"".join(batch.added),
        removed_keys=b"".join(batch.removed),
        cleared=batch.cleared,
        count=batch.count,
        xor=batch.xor,
        tier=common_pb2.TIER_DEVICE,
    )


def _blocks_from_pb(pb: kv_registry_pb2.BlocksChanged) -> BlocksSeen:
    batch = BlockBatch(
        seq=pb.seq,
        added=tuple(split_keys(pb.added_keys, name="added_keys")),
        removed=tuple(split_keys(pb.removed_keys, name="removed_keys")),
        cleared=pb.cleared,
        count=pb.count,
        xor=pb.xor,
    )
    return BlocksSeen(convert.peer_from_pb(pb.peer), batch)


_EVENTS: Final[dict[str, Callable[[kv_registry_pb2.WatchResponse], WatchEvent]]] = {
    "reset": lambda _: Reset(),
    "replica": lambda pb: ReplicaSeen(convert.replica_from_pb(pb.replica)),
    "gone": lambda pb: ReplicaGone(convert.peer_from_pb(pb.gone.peer), pb.gone.reason),
    "beat": lambda pb: _beat_from_pb(pb.beat),
    "blocks": lambda pb: _blocks_from_pb(pb.blocks),
    "caught_up": lambda _: CaughtUp(),
}
