"""`Decode`: writes answers."""

import contextlib
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeAlias

import grpc

from decode_svc.attempt import Attempt
from decode_svc.trace import Trace
from decode_svc.values import Order, Reply, Target, Wrote
from kvrelay.config import REQUEST_DEADLINE_S
from kvrelay.decode_events import Accepted, Finished, LegMoved, LegState
from kvrelay.engine.protocol import Prompt
from kvrelay.replica.process import ReplicaProcess
from kvrelay.replica.service import check_incarnation
from kvrelay.rpc import convert, lease_convert
from kvrelay.rpc.deadline import Deadline
from kvrelay.types import Sampling
from kvrelay.v1 import decode_pb2 as pb
from kvrelay.v1.decode_pb2_grpc import DecodeServicer

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_LEG_STATES = {
    LegState.STARTED: pb.PrefillLeg.STATE_STARTED,
    LegState.READY: pb.PrefillLeg.STATE_READY,
    LegState.FAILED: pb.PrefillLeg.STATE_FAILED,
    LegState.LOCAL: pb.PrefillLeg.STATE_LOCAL,
    LegState.PULLED: pb.PrefillLeg.STATE_PULLED,
}


class DecodeService(DecodeServicer):
    """Turns calls into attempts and their replies into messages."""

    def __init__(self, replica: ReplicaProcess) -> None:
        self._replica = replica

    async def Generate(  # noqa: D102, N802 - as in the proto
        self, request: pb.DecodeGenerateRequest, context: Context
    ) -> AsyncIterator[pb.DecodeGenerateResponse]:
        check_incarnation(request.expected_incarnation, self._replica.incarnation)
        attempt = Attempt(
            _order(request),
            bridge=self._replica.bridge,
            peers=self._replica.peers,
            prefix_pull=self._replica.prefix_pull,
            deadline=Deadline.of(context, REQUEST_DEADLINE_S),
            lease_ttl_s=self._replica.config.lease_ttl_s,
            trace=Trace(self._replica.telemetry, model=self._replica.identity.model),
        )
        async with contextlib.aclosing(attempt.replies()) as replies:
            async for reply in replies:
                yield _response(reply, request.attempt)


def _order(request: pb.DecodeGenerateRequest) -> Order:
    return Order(
        request_id=request.request_id,
        attempt=request.attempt,
        prompt=Prompt(
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
            root_key=request.root_key,
            block_keys=request.block_keys,
        ),
        sampling=_seeded(convert.sampling_from_pb(request.sampling), request.request_id),
        forced_next=request.forced_next if request.HasField("forced_next") else None,
        targets=tuple(_target(target) for target in request.prefill_targets),
        holder=lease_convert.holder_from_pb(request.holder) if request.HasField("holder") else None,
        priority=request.priority,
        never_local=request.never_local,
    )


def _target(target: pb.PrefillTarget) -> Target:
    return Target(
        convert.peer_from_pb(target.peer, name="prefill_targets.peer"),
        lease_convert.holder_from_pb(target.holder) if target.HasField("holder") else None,
    )


def _seeded(sampling: Sampling, request_id: str) -> Sampling:
    """Routers always give a seed; without one, all replicas that work on the request must still use the same."""
    return sampling if sampling.seed is not None else replace(sampling, seed=zlib.crc32(request_id.encode()))


def _response(reply: Reply, attempt: int) -> pb.DecodeGenerateResponse:
    match reply:
        case Accepted():
            return pb.DecodeGenerateResponse(accepted=pb.Accepted(held_tokens=reply.held_tokens))
        case Wrote():
            span = convert.TokenSpan(attempt=attempt, position=reply.position, ids=reply.ids, logprobs=reply.logprobs)
            return pb.DecodeGenerateResponse(tokens=convert.span_to_pb(span))
        case LegMoved():
            peer = convert.peer_to_pb(reply.peer) if reply.peer is not None else None
            leg = pb.PrefillLeg(state=_LEG_STATES[reply.state], peer=peer, reason=reply.reason)
            return pb.DecodeGenerateResponse(prefill_leg=leg)
        case Finished():
            return pb.DecodeGenerateResponse(
                finished=pb.Finished(
                    reason=convert.finish_reason_to_pb(reply.reason),
                    usage=convert.usage_to_pb(reply.usage),
                    stop_id=reply.stop_id,
                )
            )
