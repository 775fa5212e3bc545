"""How a router speaks with a decode replica, in kvrelay's own values."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import grpc
import grpc.aio

from kvrelay.decode_events import Accepted, Finished, LegMoved, LegState
from kvrelay.engine.protocol import Prompt
from kvrelay.errors import InvalidArgument, KvrelayError, PeerLost
from kvrelay.rpc import convert
from kvrelay.rpc.convert import TokenSpan
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.rpc.lease_convert import holder_to_pb
from kvrelay.types import Holder, Peer, Sampling
from kvrelay.v1 import common_pb2, decode_pb2
from kvrelay.v1.decode_pb2_grpc import DecodeStub


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOrder:
    """One attempt of a request; fields as `DecodeGenerateRequest` in decode.proto.

    Attributes:
        targets: prefill replicas to ask, best first; empty: read the prompt at the decode replica.
        holder: replica that holds more of the prefix than the one that reads it.
        incarnation: start of the decode replica that is meant.
    """

    request_id: str
    attempt: int
    prompt: Prompt
    sampling: Sampling
    targets: tuple[Peer, ...] = ()
    holder: Holder | None = None
    priority: int = 0
    incarnation: str = ""
    never_local: bool = False
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None


_Call: TypeAlias = "grpc.aio.UnaryStreamCall[decode_pb2.DecodeGenerateRequest, decode_pb2.DecodeGenerateResponse]"
DecodeEvent: TypeAlias = Accepted | TokenSpan | LegMoved | Finished


class DecodeStream(AsyncIterator[DecodeEvent]):
    """The events of one attempt. Close it, and the replica frees everything."""

    def __init__(self, call: "_Call") -> None:
        self._call = call
        self._responses = call.__aiter__()
        self._cut: KvrelayError | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DecodeEvent:
        """Return the next event; the iteration ends after `Finished`.

        Raises:
            KvrelayError: the attempt failed; `PeerLost` when the stream broke, ended early or was cut.
        """
        while not self._ended:
            response = await self._response()
            try:
                event = event_from_pb(response)
            except InvalidArgument as error:
                # It is the replica that sent nonsense, not the client.
                raise PeerLost(f"the decode replica sent a broken event ({error}); try another one") from error
            if event is not None:
                self._ended = isinstance(event, Finished)
                return event
        raise StopAsyncIteration

    def cut(self, reason: str) -> None:
        """End the stream from outside: whoever reads it gets `PeerLost`."""
        self._cut = PeerLost(reason)
        self._call.cancel()

    def close(self) -> None:
        """Cancel what is left of the call; closing twice is no error."""
        self._call.cancel()

    async def _response(self) -> decode_pb2.DecodeGenerateResponse:
        try:
            return await anext(self._responses)
        except StopAsyncIteration:
            raise PeerLost("the decode replica ended its stream before the answer; try another one") from None
        except grpc.RpcError as error:
            raise self._cut or from_rpc_error(error) from error
        except asyncio.CancelledError:
            # gRPC tells a call that was cancelled from here in the same way as a task that was.
            task = asyncio.current_task()
            if self._cut is None or (task is not None and task.cancelling()):
                raise
            raise self._cut from None


class DecodeClient:
    """Asks a decode replica for answers."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = DecodeStub(channel)

    def generate(self, order: DecodeOrder, *, timeout_s: float) -> DecodeStream:
        """Start an attempt; it fails with `DeadlineExceeded` after `timeout_s`."""
        return DecodeStream(self._stub.Generate(order_to_pb(order), timeout=timeout_s))


_STATES: Final = {
    decode_pb2.PrefillLeg.STATE_STARTED: LegState.STARTED,
    decode_pb2.PrefillLeg.STATE_READY: LegState.READY,
    decode_pb2.PrefillLeg.STATE_FAILED: LegState.FAILED,
    decode_pb2.PrefillLeg.STATE_LOCAL: LegState.LOCAL,
    decode_pb2.PrefillLeg.STATE_PULLED: LegState.PULLED,
}


def order_to_pb(order: DecodeOrder) -> decode_pb2.DecodeGenerateRequest:
    """Return the wire's request."""
    holder = None if order.holder is None else holder_to_pb(order.holder)
    slo = common_pb2.Slo(ttft_ms=order.ttft_slo_ms, tpot_ms=order.tpot_slo_ms)
    return decode_pb2.DecodeGenerateRequest(
        request_id=order.request_id,
        attempt=order.attempt,
        prompt_ids=order.prompt.prompt_ids,
        output_ids=order.prompt.output_ids,
        root_key=order.prompt.root_key,
        block_keys=order.prompt.block_keys,
        sampling=convert.sampling_to_pb(order.sampling),
        prefill_targets=[
            decode_pb2.PrefillTarget(
                peer=convert.peer_to_pb(peer),
                holder=None if order.holder is None or order.holder.peer.replica_id == peer.replica_id else holder,
            )
            for peer in order.targets
        ],
        holder=None if order.targets else holder,
        priority=order.priority,
        slo=slo,
        expected_incarnation=order.incarnation,
        never_local=order.never_local,
    )


def event_from_pb(pb: decode_pb2.DecodeGenerateResponse) -> DecodeEvent | None:
    """Return the event; None for a kind that a newer replica added.

    Raises:
        PeerLost: the event makes no sense.
    """
    match pb.WhichOneof("event"):
        case "accepted":
            return Accepted(pb.accepted.held_tokens)
        case "tokens":
            return convert.span_from_pb(pb.tokens)
        case "prefill_leg":
            return _leg_from_pb(pb.prefill_leg)
        case "finished":
            return _finished_from_pb(pb.finished)
        case _:
            return None


def _leg_from_pb(pb: decode_pb2.PrefillLeg) -> LegMoved | None:
    state = _STATES.get(pb.state)
    peer = convert.peer_from_pb(pb.peer) if pb.HasField("peer") and pb.peer.replica_id else None
    return None if state is None else LegMoved(state, peer, pb.reason)


def _finished_from_pb(pb: decode_pb2.Finished) -> Finished:
    reason = convert.finish_reason_from_pb(pb.reason)
    if reason is None:
        raise PeerLost("the decode replica ended an answer without a reason; try another one")
    return Finished(reason, convert.usage_from_pb(pb.usage), pb.stop_id if pb.HasField("stop_id") else None)
