"""`Prefill`: reads prompts for decode replicas."""

import time
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from kvrelay.config import LEASE_TTL_S, REQUEST_DEADLINE_S
from kvrelay.engine.protocol import Event, FirstToken, Granted, Held, PiecesFinal, Prefill, Prompt, Pulled, PullFailed
from kvrelay.errors import DeadlineExceeded
from kvrelay.replica.channel import JobChannel
from kvrelay.replica.process import ReplicaProcess
from kvrelay.replica.service import check_incarnation
from kvrelay.rpc import convert, lease_convert
from kvrelay.rpc.deadline import Deadline
from kvrelay.types import Holder
from kvrelay.v1 import prefill_pb2 as pb
from kvrelay.v1.prefill_pb2_grpc import PrefillServicer

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class PrefillService(PrefillServicer):
    """Submits a job a call and tells what the engine tells of it."""

    def __init__(self, replica: ReplicaProcess) -> None:
        self._replica = replica
        self._bridge = replica.bridge
        self._telemetry = replica.telemetry

    async def Start(self, request: pb.StartRequest, context: Context) -> AsyncIterator[pb.StartResponse]:  # noqa: D102, N802 - as in the proto
        check_incarnation(request.expected_incarnation, self._replica.incarnation)
        deadline = Deadline.of(context, REQUEST_DEADLINE_S)
        holder = lease_convert.holder_from_pb(request.holder) if request.HasField("holder") else None
        command = self._command(request, holder, deadline)
        lease_id = ""
        first: FirstToken | None = None
        try:
            async with self._bridge.job(command) as channel:
                while first is None:
                    event = await _next(channel, deadline)
                    if isinstance(event, Held):
                        await self._replica.prefix_pull.bring(channel, event, holder, request.block_keys, deadline)
                        continue
                    if isinstance(event, Pulled | PullFailed):
                        continue  # of a load that was given up
                    if isinstance(event, Granted):
                        lease_id = event.lease.lease_id
                    yield self._response(request, event)
                    first = event if isinstance(event, FirstToken) else None
            if first.finish_reason is None:
                # The stream stays open as long as the lease lives: a puller that dies or gives up is noticed at once.
                await self._bridge.leases.ended(lease_id, timeout_s=deadline.left_s())
        finally:
            if lease_id:
                self._bridge.leases.release([lease_id])

    def _command(self, request: pb.StartRequest, holder: Holder | None, deadline: Deadline) -> Prefill:
        return Prefill(
            job_id=self._bridge.job_id(request.request_id, request.attempt),
            prompt=Prompt(
                prompt_ids=request.prompt_ids,
                output_ids=request.output_ids,
                root_key=request.root_key,
                block_keys=request.block_keys,
            ),
            sampling=convert.sampling_from_pb(request.sampling),
            forced_next=request.forced_next if request.HasField("forced_next") else None,
            held_tokens=request.held_tokens,
            prefix_tokens=self._replica.prefix_pull.tokens(holder),
            priority=request.priority,
            deadline_at_s=deadline.at_s,
            lease_ttl_s=min(request.lease_ttl_s or LEASE_TTL_S, self._replica.config.lease_ttl_s),
        )

    def _response(self, request: pb.StartRequest, event: Event) -> pb.StartResponse:
        match event:
            case Granted():
                self._trace_queue(event)
                lease = lease_convert.lease_to_pb(event.lease, self._replica.peer)
                return pb.StartResponse(
                    granted=pb.Granted(
                        lease=lease,
                        cached_tokens=event.cached_tokens,
                        queue_s=event.queue_s,
                        pulled_tokens=event.pulled_tokens,
                        pulled_bytes=event.pulled_bytes,
                    )
                )
            case PiecesFinal():
                return pb.StartResponse(ready=pb.Ready(pages=event.pages, all=event.all))
            case FirstToken():
                self._trace_compute(request, event)
                return pb.StartResponse(first_token=_first_token(request, event))
            case _:
                raise AssertionError(f"a prefill job told {type(event).__name__}")

    def _trace_queue(self, event: Granted) -> None:
        now_s = time.monotonic()
        self._telemetry.record_span(
            "prefill.queue",
            start_s=now_s - event.queue_s,
            end_s=now_s,
            attributes={"kvrelay.tokens.cached": event.cached_tokens},
        )

    def _trace_compute(self, request: pb.StartRequest, event: FirstToken) -> None:
        now_s = time.monotonic()
        self._telemetry.metrics.prompt_computed(expected_s=event.predicted_s, elapsed_s=event.compute_s)
        self._telemetry.record_span(
            "prefill.compute",
            start_s=now_s - event.compute_s,
            end_s=now_s,
            attributes={"kvrelay.tokens.computed": event.computed_tokens},
        )
        self._telemetry.logger.info(
            "prefill_done",
            puller=request.puller.replica_id,
            prompt_tokens=len(request.prompt_ids) // 4,
            computed_tokens=event.computed_tokens,
            compute_s=round(event.compute_s, 4),
        )


async def _next(channel: JobChannel, deadline: Deadline) -> Event:
    try:
        return await channel.get(timeout_s=deadline.left_s())
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed while the prompt was being read") from None


def _first_token(request: pb.StartRequest, event: FirstToken) -> pb.FirstToken:
    span = convert.TokenSpan(
        attempt=request.attempt,
        position=event.position,
        ids=(event.token,),
        logprobs=(event.logprobs,) if event.logprobs is not None else (),
    )
    return pb.FirstToken(
        token=convert.span_to_pb(span),
        finish_reason=convert.finish_reason_to_pb(event.finish_reason),
        computed_tokens=event.computed_tokens,
        compute_s=event.compute_s,
    )
