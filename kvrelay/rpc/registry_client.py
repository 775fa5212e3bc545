"""How replicas and routers speak with the registry, in the values of `kvrelay.directory`.

A failed call raises the error of `kvrelay.errors` that it stands for: `Unavailable` when the registry or its store does
not answer, `DeadlineExceeded` when `timeout_s` passed first.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc
import grpc.aio

from kvrelay.directory import Answer, BlockBatch, Booked, Reservation, Settlement, Watched
from kvrelay.kv.keys import xor_keys
from kvrelay.rpc import convert, registry_convert
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.types import ModelIdentity, Peer, Replica, ReplicaState
from kvrelay.v1 import kv_registry_pb2
from kvrelay.v1.kv_registry_pb2_grpc import KvRegistryStub

SNAPSHOT_CHUNK_KEYS: Final = 8192
"""Keys in one message of a snapshot: 128 KiB, which the store takes in a few milliseconds."""


class RegistryClient:
    """Speaks with `KvRegistry`.

    Args:
        channel: a channel to the registry (`kvrelay.rpc.channel`); closed by its owner.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = KvRegistryStub(channel)

    async def register(self, replica: Replica, *, ttl_s: float, timeout_s: float) -> tuple[int, ModelIdentity]:
        """Enter a replica; return its epoch and the pool's identity. Its block set is empty then, at seq 0.

        Raises:
            Mismatch: the identity or the layout differs from that of the pool's live members; names the field.
            StaleIncarnation: a newer incarnation of the same id has entered; this one must stop.
            Unavailable: the registry or its store does not answer.
        """
        request = kv_registry_pb2.RegisterRequest(replica=convert.replica_to_pb(replica), ttl_s=ttl_s)
        with _errors():
            response = await self._stub.Register(request, timeout=timeout_s)
            return response.epoch, convert.identity_from_pb(response.identity)

    async def check_router(self, identity: ModelIdentity, *, timeout_s: float) -> ModelIdentity:
        """Return the identity of the pool that serves `identity.model`.

        Fields of `identity` that are empty or 0 are not known to the router and not compared.

        Raises:
            Mismatch: a field that is given differs; names it.
            Unavailable: no replica of the model has entered yet, or the registry or its store does not answer.
        """
        request = kv_registry_pb2.RegisterRequest(router=convert.identity_to_pb(identity))
        with _errors():
            response = await self._stub.Register(request, timeout=timeout_s)
            return convert.identity_from_pb(response.identity)

    async def heartbeat(
        self, peer: Peer, *, model: str, epoch: int, state: ReplicaState, ttl_s: float, timeout_s: float
    ) -> Answer:
        """Prove life for `ttl_s` seconds and tell the state."""
        request = kv_registry_pb2.HeartbeatRequest(
            peer=convert.peer_to_pb(peer),
            model=model,
            epoch=epoch,
            state=convert.replica_state_to_pb(state),
            ttl_s=ttl_s,
        )
        with _errors():
            response = await self._stub.Heartbeat(request, timeout=timeout_s)
            return Answer(response.register_again, response.snapshot_wanted)

    async def deregister(self, peer: Peer, *, model: str, timeout_s: float) -> None:
        """Take a replica out; its blocks, reservations and entry are gone when this returns."""
        request = kv_registry_pb2.DeregisterRequest(peer=convert.peer_to_pb(peer), model=model)
        with _errors():
            await self._stub.Deregister(request, timeout=timeout_s)

    async def publish(self, peer: Peer, *, model: str, epoch: int, batch: BlockBatch, timeout_s: float) -> Answer:
        """Change a replica's block set: all of the batch or, when a snapshot is wanted, nothing.

        A batch that was taken before its answer was lost may be sent again.
        """
        request = registry_convert.batch_to_pb(peer, model=model, epoch=epoch, batch=batch)
        with _errors():
            response = await self._stub.PublishBlocks(request, timeout=timeout_s)
            return Answer(response.register_again, response.snapshot_wanted)

    async def put_snapshot(
        self, peer: Peer, *, model: str, epoch: int, seq: int, keys: Sequence[bytes], timeout_s: float
    ) -> bool:
        """Replace a replica's block set, which then has `seq`; return False when it was not taken: send a new one."""
        requests = _snapshot_requests(peer, model=model, epoch=epoch, seq=seq, keys=keys)
        with _errors():
            response = await self._stub.PutSnapshot(requests, timeout=timeout_s)
            return response.accepted

    async def watch(self, model: str, position: str = "") -> AsyncGenerator[Watched, None]:
        """Yield a replay from `position` or a snapshot after `Reset`, then `CaughtUp`, then events, for ever.

        Positions are empty until `CaughtUp`: a snapshot cannot be resumed halfway. Closing the iterator ends the call.

        Raises:
            KvrelayError: the stream broke; watch again from the last position.
        """
        call = self._stub.Watch(kv_registry_pb2.WatchRequest(model=model, position=position))
        try:
            with _errors():
                async for response in call:
                    watched = registry_convert.watched_from_pb(response)
                    if watched is not None:
                        yield watched
        finally:
            call.cancel()

    async def reserve(self, model: str, reservations: Sequence[Reservation], *, timeout_s: float) -> list[Booked]:
        """Book load; one result a reservation, in order. Each takes the first of its pairs that fits under its caps."""
        request = kv_registry_pb2.ReserveRequest(
            model=model, reservations=[registry_convert.reservation_to_pb(each) for each in reservations]
        )
        with _errors():
            response = await self._stub.Reserve(request, timeout=timeout_s)
            return [registry_convert.booked_from_pb(each) for each in response.booked]

    async def settle(self, model: str, settlements: Sequence[Settlement], *, timeout_s: float) -> list[bool]:
        """Renew, move or end booked legs; one result a settlement: False when the reservation was not there."""
        request = kv_registry_pb2.SettleRequest(
            model=model, settlements=[registry_convert.settlement_to_pb(each) for each in settlements]
        )
        with _errors():
            response = await self._stub.Settle(request, timeout=timeout_s)
            return list(response.found)


def _snapshot_requests(
    peer: Peer, *, model: str, epoch: int, seq: int, keys: Sequence[bytes]
) -> Iterator[kv_registry_pb2.PutSnapshotRequest]:
    last_start = max(0, (len(keys) - 1) // SNAPSHOT_CHUNK_KEYS * SNAPSHOT_CHUNK_KEYS)
    for start in range(0, last_start + 1, SNAPSHOT_CHUNK_KEYS):
        last = start == last_start
        yield kv_registry_pb2.PutSnapshotRequest(
            peer=convert.peer_to_pb(peer),
            model=model,
            epoch=epoch,
            seq=seq,
            keys=b"".join(keys[start : start + SNAPSHOT_CHUNK_KEYS]),
            last=last,
            count=len(keys) if last else 0,
            xor=xor_keys(keys) if last else b"",
        )


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
