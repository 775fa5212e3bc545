"""Between the engine's values of leases and memory, and protobuf messages. Pure.

Apart from `convert`, so that clients need nothing of the engine.
"""

import math
from collections.abc import Iterable

from kvrelay.engine.protocol import AgentInfo, LeasedPage, LeaseGrant
from kvrelay.errors import InvalidArgument
from kvrelay.rpc.convert import layout_from_pb, layout_to_pb, peer_from_pb, peer_to_pb
from kvrelay.types import Holder, Peer
from kvrelay.v1 import common_pb2, kv_source_pb2, prefill_pb2

_TIERS = {
    "device": common_pb2.TIER_DEVICE,
    "host": common_pb2.TIER_HOST,
    "disk": common_pb2.TIER_DISK,
}
_TIERS_BACK = {pb: tier for tier, pb in _TIERS.items()} | {common_pb2.TIER_UNSPECIFIED: "device"}


def pages_to_pb(pages: Iterable[LeasedPage]) -> list[kv_source_pb2.LeasedPage]:
    """Return the wire's leased pages."""
    return [
        kv_source_pb2.LeasedPage(page=page.page, generation=page.generation, valid_tokens=page.valid_tokens)
        for page in pages
    ]


def pages_from_pb(pbs: Iterable[kv_source_pb2.LeasedPage]) -> tuple[LeasedPage, ...]:
    """Return the leased pages."""
    return tuple(LeasedPage(pb.page, pb.generation, pb.valid_tokens) for pb in pbs)


def lease_to_pb(lease: LeaseGrant, owner: Peer) -> kv_source_pb2.Lease:
    """Return the wire's lease; `owner` is the replica that granted it."""
    return kv_source_pb2.Lease(
        lease_id=lease.lease_id,
        owner=peer_to_pb(owner),
        pages=pages_to_pb(lease.pages),
        first_position=lease.first_position,
        ttl_s=lease.ttl_s,
    )


def lease_from_pb(pb: kv_source_pb2.Lease) -> LeaseGrant:
    """Return the lease; its owner is `peer_from_pb(pb.owner)`.

    Raises:
        InvalidArgument: it has no id, or a time to live that is no number of seconds.
    """
    if not pb.lease_id:
        raise InvalidArgument("lease.lease_id", "must not be empty")
    if not (math.isfinite(pb.ttl_s) and pb.ttl_s >= 0):
        raise InvalidArgument("lease.ttl_s", f"{pb.ttl_s} is not a finite number of seconds")
    return LeaseGrant(
        lease_id=pb.lease_id,
        pages=pages_from_pb(pb.pages),
        first_position=pb.first_position,
        ttl_s=pb.ttl_s,
    )


def agent_to_pb(agent: AgentInfo, owner: Peer) -> kv_source_pb2.HandshakeResponse:
    """Return the answer to a handshake; `owner` is the replica whose memory it is."""
    return kv_source_pb2.HandshakeResponse(
        owner=peer_to_pb(owner),
        layout=layout_to_pb(agent.layout),
        agent_name=agent.agent_name,
        agent_metadata=agent.agent_metadata,
        base_address=agent.base_address,
        pages=agent.pages,
        device_id=agent.device_id,
        memory=agent.memory,
    )


def agent_from_pb(pb: kv_source_pb2.HandshakeResponse) -> AgentInfo:
    """Return what a handshake told.

    Raises:
        InvalidArgument: the owner is not named.
    """
    owner = peer_from_pb(pb.owner, name="owner")
    return AgentInfo(
        replica_id=owner.replica_id,
        incarnation=owner.incarnation,
        agent_name=pb.agent_name,
        agent_metadata=pb.agent_metadata,
        base_address=pb.base_address,
        pages=pb.pages,
        layout=layout_from_pb(pb.layout),
        memory=pb.memory,
        device_id=pb.device_id,
    )


def holder_to_pb(holder: Holder) -> prefill_pb2.PrefixHolder:
    """Return the wire's holder."""
    return prefill_pb2.PrefixHolder(peer=peer_to_pb(holder.peer), blocks=holder.blocks, tier=_TIERS[holder.tier])


def holder_from_pb(pb: prefill_pb2.PrefixHolder) -> Holder | None:
    """Return the holder; None when its tier is one that this version does not know, and cannot pull from.

    Raises:
        InvalidArgument: it names no replica.
    """
    peer = peer_from_pb(pb.peer, name="holder.peer")
    return Holder(peer, pb.blocks, _TIERS_BACK[pb.tier]) if pb.tier in _TIERS_BACK else None
