"""`KvSource`: leases of the KV that lies in this replica."""

from typing import Any, Protocol, TypeAlias

import grpc

from kvrelay.engine.protocol import LeaseReply
from kvrelay.errors import NotFound, ResourceExhausted, StaleIncarnation
from kvrelay.kv.keys import check_identity, check_layout
from kvrelay.replica.bridge import EngineBridge
from kvrelay.rpc import convert, lease_convert
from kvrelay.rpc.deadline import Deadline
from kvrelay.types import ModelIdentity, Peer
from kvrelay.v1 import kv_source_pb2 as pb
from kvrelay.v1.kv_source_pb2_grpc import KvSourceServicer

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

ENGINE_ANSWER_TIMEOUT_S = 5.0
"""Longest wait for the engine's answer about a lease: it answers between steps of 1-3 s on a busy CPU."""


def check_incarnation(expected: str, own: str) -> None:
    """Refuse a request that was meant for an earlier start of this replica; an empty expectation fits any.

    Raises:
        StaleIncarnation: it was.
    """
    if expected and expected != own:
        raise StaleIncarnation(f"the replica was restarted: asked for incarnation {expected}, this is {own}")


class Owner(Protocol):
    """What the service needs of its replica; read at each call, since the address is known late."""

    @property
    def bridge(self) -> EngineBridge:
        """The engine."""
        ...

    @property
    def peer(self) -> Peer:
        """Who this is."""
        ...

    @property
    def identity(self) -> ModelIdentity:
        """What it serves."""
        ...


class KvSource(KvSourceServicer):
    """Serves leases out of the engine's table; holds no state of its own."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeResponse:  # noqa: ARG002, D102, N802 - as in the proto
        check_incarnation(request.owner_incarnation, self._owner.peer.incarnation)
        agent = self._owner.bridge.started.agent
        check_layout(agent.layout, convert.layout_from_pb(request.layout))
        check_identity(self._owner.identity, convert.identity_from_pb(request.identity))
        return lease_convert.agent_to_pb(agent, self._owner.peer)

    async def LeasePrefix(self, request: pb.LeasePrefixRequest, context: Context) -> pb.LeasePrefixResponse:  # noqa: D102, N802 - as in the proto
        check_incarnation(request.owner_incarnation, self._owner.peer.incarnation)
        reply = await self._owner.bridge.leases.lease_prefix(
            request.block_keys, skip_blocks=request.skip_blocks, ttl_s=request.ttl_s, timeout_s=_timeout_s(context)
        )
        if reply.lease is None:
            raise _refusal(reply)
        return pb.LeasePrefixResponse(lease=lease_convert.lease_to_pb(reply.lease, self._owner.peer))

    async def Extend(self, request: pb.ExtendRequest, context: Context) -> pb.ExtendResponse:  # noqa: D102, N802 - as in the proto
        if request.owner_incarnation != self._owner.peer.incarnation:
            return pb.ExtendResponse(ended_lease_ids=request.lease_ids)
        reply = await self._owner.bridge.leases.extend(
            request.lease_ids, ttl_s=request.ttl_s, timeout_s=_timeout_s(context)
        )
        return pb.ExtendResponse(ended_lease_ids=reply.ended)

    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmResponse:  # noqa: D102, N802 - as in the proto
        if request.owner_incarnation != self._owner.peer.incarnation:
            return pb.ConfirmResponse(valid=False, reason="incarnation")
        reply = await self._owner.bridge.leases.confirm(
            request.lease_id, lease_convert.pages_from_pb(request.pages), timeout_s=_timeout_s(context)
        )
        return pb.ConfirmResponse(valid=reply.valid, reason=reply.reason)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:  # noqa: ARG002, D102, N802 - as in the proto
        if request.owner_incarnation == self._owner.peer.incarnation and request.lease_ids:
            self._owner.bridge.leases.release(request.lease_ids)
        return pb.ReleaseResponse()


def _timeout_s(context: Context) -> float:
    return Deadline.of(context, ENGINE_ANSWER_TIMEOUT_S).sooner(ENGINE_ANSWER_TIMEOUT_S).left_s()


def _refusal(reply: LeaseReply) -> NotFound | ResourceExhausted:
    if reply.reason == "stock_bound":
        return ResourceExhausted("too much KV lies under lease here already; compute the prefix or ask another holder")
    return NotFound("not even the first block of the prefix is held here; compute it or ask another holder")
