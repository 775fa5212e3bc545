"""How one replica speaks with another: `Prefill` and `KvSource`, in kvrelay's own values.

A failed call raises the error of `kvrelay.errors` that it stands for.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from kvrelay.engine.protocol import AgentInfo, FirstToken, Granted, JobId, LeasedPage, LeaseGrant, PiecesFinal, Prompt
from kvrelay.errors import PeerLost
from kvrelay.rpc import convert, lease_convert
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.types import Holder, KvLayout, ModelIdentity, Peer, Sampling
from kvrelay.v1 import kv_source_pb2, prefill_pb2
from kvrelay.v1.kv_source_pb2_grpc import KvSourceStub
from kvrelay.v1.prefill_pb2_grpc import PrefillStub

PrefillEvent: TypeAlias = Granted | PiecesFinal | FirstToken


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOrder:
    """A prompt to be read by a prefill replica; fields as `StartRequest` in prefill.proto."""

    request_id: str
    attempt: int
    prompt: Prompt
    sampling: Sampling
    forced_next: int | None
    held_tokens: int
    puller: Peer
    priority: int
    lease_ttl_s: float
    holder: Holder | None = None


class PrefillClient:
    """Asks a prefill replica to read prompts."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = PrefillStub(channel)

    async def start(
        self, order: PrefillOrder, *, incarnation: str, job_id: JobId, timeout_s: float
    ) -> AsyncGenerator[PrefillEvent, None]:
        """Yield what the prefill replica tells, as events of `job_id`; after `FirstToken` the lease's end is the end.

        Closing the iterator before that cancels the call, and the replica frees everything.

        Raises:
            KvrelayError: the call failed, or ended before the first token.
        """
        call = self._stub.Start(_start_request(order, incarnation), timeout=timeout_s)
        lease_id = ""
        event: PrefillEvent | None = None
        try:
            with _errors():
                async for response in call:
                    event = _prefill_event(response, job_id, lease_id)
                    if isinstance(event, Granted):
                        lease_id = event.lease.lease_id
                    yield event
        finally:
            call.cancel()
        if not isinstance(event, FirstToken):
            raise PeerLost("the prefill replica ended its stream before the first token; try another one")


class KvSourceClient:
    """Speaks with the owner of leases."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = KvSourceStub(channel)

    async def handshake(
        self, *, puller: Peer, layout: KvLayout, identity: ModelIdentity, owner_incarnation: str, timeout_s: float
    ) -> AgentInfo:
        """Exchange what a puller needs before its first READ.

        Raises:
            Mismatch: layout or identity differ.
            StaleIncarnation: the owner was restarted.
        """
        request = kv_source_pb2.HandshakeRequest(
            puller=convert.peer_to_pb(puller),
            layout=convert.layout_to_pb(layout),
            identity=convert.identity_to_pb(identity),
            owner_incarnation=owner_incarnation,
        )
        with _errors():
            return lease_convert.agent_from_pb(await self._stub.Handshake(request, timeout=timeout_s))

    async def lease_prefix(
        self,
        *,
        puller: Peer,
        owner_incarnation: str,
        block_keys: bytes,
        skip_blocks: int,
        ttl_s: float,
        timeout_s: float,
    ) -> LeaseGrant:
        """Lease the longest prefix that the owner holds of the keys, past the first `skip_blocks`.

        Raises:
            NotFound: it holds nothing of them.
            ResourceExhausted: too much lies under lease there.
            StaleIncarnation: the owner was restarted.
        """
        request = kv_source_pb2.LeasePrefixRequest(
            puller=convert.peer_to_pb(puller),
            owner_incarnation=owner_incarnation,
            block_keys=block_keys,
            skip_blocks=skip_blocks,
            ttl_s=ttl_s,
        )
        with _errors():
            response = await self._stub.LeasePrefix(request, timeout=timeout_s)
        return lease_convert.lease_from_pb(response.lease)

    async def extend(
        self, *, owner_incarnation: str, lease_ids: Sequence[str], ttl_s: float, timeout_s: float
    ) -> tuple[str, ...]:
        """Move the deadlines of leases; return those that have ended."""
        request = kv_source_pb2.ExtendRequest(owner_incarnation=owner_incarnation, lease_ids=lease_ids, ttl_s=ttl_s)
        with _errors():
            response = await self._stub.Extend(request, timeout=timeout_s)
        return tuple(response.ended_lease_ids)

    async def confirm(
        self, *, owner_incarnation: str, lease_id: str, pages: Sequence[LeasedPage], timeout_s: float
    ) -> tuple[bool, str]:
        """Ask for the verdict on a finished pull; return (valid, reason when it is not)."""
        request = kv_source_pb2.ConfirmRequest(
            owner_incarnation=owner_incarnation,
            lease_id=lease_id,
            pages=lease_convert.pages_to_pb(pages),
        )
        with _errors():
            response = await self._stub.Confirm(request, timeout=timeout_s)
        return response.valid, response.reason

    async def release(self, *, owner_incarnation: str, lease_ids: Sequence[str], timeout_s: float) -> None:
        """End leases that will not be pulled."""
        request = kv_source_pb2.ReleaseRequest(owner_incarnation=owner_incarnation, lease_ids=lease_ids)
        with _errors():
            await self._stub.Release(request, timeout=timeout_s)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _start_request(order: PrefillOrder, incarnation: str) -> prefill_pb2.StartRequest:
    return prefill_pb2.StartRequest(
        request_id=order.request_id,
        attempt=order.attempt,
        prompt_ids=order.prompt.prompt_ids,
        output_ids=order.prompt.output_ids,
        root_key=order.prompt.root_key,
        block_keys=order.prompt.block_keys,
        sampling=convert.sampling_to_pb(order.sampling),
        forced_next=order.forced_next,
        held_tokens=order.held_tokens,
        puller=convert.peer_to_pb(order.puller),
        priority=order.priority,
        lease_ttl_s=order.lease_ttl_s,
        expected_incarnation=incarnation,
        holder=None if order.holder is None else lease_convert.holder_to_pb(order.holder),
    )


def _prefill_event(response: prefill_pb2.StartResponse, job_id: JobId, lease_id: str) -> PrefillEvent:
    match response.WhichOneof("event"):
        case "granted":
            granted = response.granted
            return Granted(
                job_id=job_id,
                lease=lease_convert.lease_from_pb(granted.lease),
                cached_tokens=granted.cached_tokens,
                queue_s=granted.queue_s,
                pulled_tokens=granted.pulled_tokens,
                pulled_bytes=granted.pulled_bytes,
            )
        case "ready":
            return PiecesFinal(job_id=job_id, lease_id=lease_id, pages=response.ready.pages, all=response.ready.all)
        case "first_token":
            return _first_token(response.first_token, job_id)
        case _:
            raise PeerLost("the prefill replica sent an event that this version does not know; try another one")


def _first_token(told: prefill_pb2.FirstToken, job_id: JobId) -> FirstToken:
    span = convert.span_from_pb(told.token)
    return FirstToken(
        job_id=job_id,
        position=span.position,
        token=span.ids[0],
        logprobs=span.logprobs[0] if span.logprobs else None,
        finish_reason=convert.finish_reason_from_pb(told.finish_reason),
        computed_tokens=told.computed_tokens,
        compute_s=told.compute_s,
    )
