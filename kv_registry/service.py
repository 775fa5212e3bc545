"""The `KvRegistry` service: checks what comes in, gives every call a deadline, and leaves the work to the store."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from kv_registry.blocks import Upload
from kv_registry.checks import (
    RESERVATIONS_MAX,
    check_name,
    check_number,
    check_peer,
    check_replica,
    check_reservation,
    check_router,
    check_seq,
    check_settlement,
    check_ttl,
)
from kv_registry.feed import Feeds
from kv_registry.members import IDENTITY_FIELDS
from kv_registry.store import Store
from kv_registry.watch import Watcher
from kvrelay.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvrelay.kv.keys import xor_keys
from kvrelay.rpc import convert, registry_convert
from kvrelay.rpc.deadline import Deadline
from kvrelay.types import ModelIdentity, Peer, split_keys
from kvrelay.v1 import common_pb2, kv_registry_pb2
from kvrelay.v1.kv_registry_pb2_grpc import KvRegistryServicer, add_KvRegistryServicer_to_server

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE: Final[str] = kv_registry_pb2.DESCRIPTOR.services_by_name["KvRegistry"].full_name

STORE_TIMEOUT_S: Final = 3.0
"""Longest wait for the store in one call, whatever the caller's deadline: a healthy one answers within ms."""

ANSWER_RESERVE_S: Final = 0.01
"""Part of the caller's deadline kept for telling it why there is no answer."""

SNAPSHOT_TIMEOUT_S: Final = 30.0
"""Longest upload of a snapshot."""


class RegistryService(KvRegistryServicer):
    """Serves `KvRegistry` over a store."""

    def __init__(self, store: Store, feeds: Feeds) -> None:
        self._store = store
        self._feeds = feeds

    async def Register(  # noqa: N802
        self, request: kv_registry_pb2.RegisterRequest, context: Context
    ) -> kv_registry_pb2.RegisterResponse:
        """Enter a replica, or check a router's identity."""
        match request.WhichOneof("member"):
            case "replica":
                return await self._register_replica(request, context)
            case "router":
                return await self._check_router(convert.identity_from_pb(request.router), context)
            case _:
                raise InvalidArgument("member", "a replica or a router must be given")

    async def _register_replica(
        self, request: kv_registry_pb2.RegisterRequest, context: Context
    ) -> kv_registry_pb2.RegisterResponse:
        replica = convert.replica_from_pb(request.replica)
        check_replica(replica)
        check_ttl(request.ttl_s)
        async with _store_deadline(context):
            epoch = await self._store.register(replica, ttl_s=request.ttl_s)
            pool = await self._store.members.identity(replica.identity.model)
        identity = convert.identity_to_pb(pool or replica.identity)
        return kv_registry_pb2.RegisterResponse(epoch=epoch, identity=identity)

    async def _check_router(self, router: ModelIdentity, context: Context) -> kv_registry_pb2.RegisterResponse:
        check_name("router.model", router.model)
        async with _store_deadline(context):
            pool = await self._store.members.identity(router.model)
        if pool is None:
            raise Unavailable(f"no replica of {router.model!r} has registered yet; start one, or try again")
        check_router(pool, router, IDENTITY_FIELDS)
        return kv_registry_pb2.RegisterResponse(identity=convert.identity_to_pb(pool))

    async def Heartbeat(  # noqa: N802
        self, request: kv_registry_pb2.HeartbeatRequest, context: Context
    ) -> kv_registry_pb2.HeartbeatResponse:
        """Renew a replica's life."""
        peer = _caller(request.peer, request.model)
        check_ttl(request.ttl_s)
        async with _store_deadline(context):
            answer = await self._store.members.heartbeat(
                peer,
                model=request.model,
                epoch=request.epoch,
                state=convert.replica_state_from_pb(request.state),
                ttl_s=request.ttl_s,
            )
        return kv_registry_pb2.HeartbeatResponse(
            register_again=answer.register_again, snapshot_wanted=answer.snapshot_wanted
        )

    async def Deregister(  # noqa: N802
        self, request: kv_registry_pb2.DeregisterRequest, context: Context
    ) -> kv_registry_pb2.DeregisterResponse:
        """Take a replica out."""
        peer = _caller(request.peer, request.model)
        async with _store_deadline(context):
            await self._store.deregister(peer, model=request.model)
        return kv_registry_pb2.DeregisterResponse()

    async def PublishBlocks(  # noqa: N802
        self, request: kv_registry_pb2.PublishBlocksRequest, context: Context
    ) -> kv_registry_pb2.PublishBlocksResponse:
        """Change a replica's block set."""
        peer = _caller(request.peer, request.model)
        if request.tier not in {common_pb2.TIER_UNSPECIFIED, common_pb2.TIER_DEVICE}:
            raise InvalidArgument("tier", "only blocks in device memory are kept so far")
        check_seq(request.seq, request.count)
        async with _store_deadline(context):
            answer = await self._store.blocks.publish(
                peer, model=request.model, epoch=request.epoch, batch=registry_convert.batch_from_pb(request)
            )
        return kv_registry_pb2.PublishBlocksResponse(
            snapshot_wanted=answer.snapshot_wanted, register_again=answer.register_again
        )

    async def PutSnapshot(  # noqa: N802
        self, request_iterator: AsyncIterator[kv_registry_pb2.PutSnapshotRequest], context: Context
    ) -> kv_registry_pb2.PutSnapshotResponse:
        """Stage the chunks of a snapshot, then swap it in."""
        upload: Upload | None = None
        xor = xor_keys(())
        async with _store_deadline(context, at_most_s=SNAPSHOT_TIMEOUT_S):
            async for chunk in request_iterator:
                upload = upload or _upload_of(chunk)
                xor = xor_keys(split_keys(chunk.keys), xor)
                if not await self._store.blocks.stage(upload, chunk.keys):
                    break
                if chunk.last:
                    return kv_registry_pb2.PutSnapshotResponse(accepted=await self._swap(upload, chunk, xor))
        return kv_registry_pb2.PutSnapshotResponse(accepted=False)

    async def _swap(self, upload: Upload, last: kv_registry_pb2.PutSnapshotRequest, xor: bytes) -> bool:
        check_seq(last.seq, last.count)
        if xor != last.xor:
            return False
        return await self._store.blocks.swap(upload, seq=last.seq, count=last.count, xor=xor)

    async def Watch(  # noqa: N802
        self, request: kv_registry_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[kv_registry_pb2.WatchResponse]:
        """Follow a model for ever."""
        del context
        check_name("model", request.model)
        with self._feeds.tap(request.model) as tap:
            watcher = Watcher(self._store, tap, request.model, request.position)
            async with aclosing(watcher.events()) as events:
                async for watched in events:
                    yield registry_convert.watched_to_pb(watched)

    async def Reserve(  # noqa: N802
        self, request: kv_registry_pb2.ReserveRequest, context: Context
    ) -> kv_registry_pb2.ReserveResponse:
        """Book load."""
        check_name("model", request.model)
        check_number("reservations", len(request.reservations), RESERVATIONS_MAX)
        reservations = [registry_convert.reservation_from_pb(each) for each in request.reservations]
        for reservation in reservations:
            check_reservation(reservation)
        async with _store_deadline(context):
            booked = await self._store.reservations.reserve(request.model, reservations)
        return kv_registry_pb2.ReserveResponse(booked=[registry_convert.booked_to_pb(each) for each in booked])

    async def Settle(  # noqa: N802
        self, request: kv_registry_pb2.SettleRequest, context: Context
    ) -> kv_registry_pb2.SettleResponse:
        """Renew, move or end legs."""
        check_name("model", request.model)
        check_number("settlements", len(request.settlements), RESERVATIONS_MAX)
        settlements = [registry_convert.settlement_from_pb(each) for each in request.settlements]
        for settlement in settlements:
            check_settlement(settlement)
        async with _store_deadline(context):
            found = await self._store.reservations.settle(request.model, settlements)
        return kv_registry_pb2.SettleResponse(found=found)

    async def TakeTokens(  # noqa: N802
        self, request: kv_registry_pb2.TakeTokensRequest, context: Context
    ) -> kv_registry_pb2.TakeTokensResponse:
        """Refuse: there are no token buckets yet."""
        del request, context
        raise FailedPrecondition("token buckets are not served by this registry; run routers without rate limits")


def add_to(server: grpc.aio.Server, service: RegistryService) -> None:
    """Add the service to a server that has not started."""
    add_KvRegistryServicer_to_server(service, server)


def _caller(peer_pb: common_pb2.Peer, model: str) -> Peer:
    peer = convert.peer_from_pb(peer_pb)
    check_peer(peer)
    check_name("model", model)
    return peer


def _upload_of(chunk: kv_registry_pb2.PutSnapshotRequest) -> Upload:
    peer = _caller(chunk.peer, chunk.model)
    return Upload(peer=peer, model=chunk.model, epoch=chunk.epoch, name=uuid.uuid4().hex)


@asynccontextmanager
async def _store_deadline(context: Context, *, at_most_s: float = STORE_TIMEOUT_S) -> AsyncIterator[None]:
    left_s = Deadline.of(context, at_most_s).left_s() - ANSWER_RESERVE_S
    try:
        async with asyncio.timeout(max(0.0, min(left_s, at_most_s))):
            yield
    except TimeoutError as error:
        raise Unavailable("the registry's store gave no answer in time: check Redis") from error
