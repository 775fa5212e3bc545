"""From the messages of the router's protocol to values, and back where both ways are needed. Pure.

What a newer router may send is taken as far as it is understood: a client has nobody to complain to.
"""

from kvrelay.client.values import Decision, Delta, Finish, FleetStatus, ModelInfo, Part, ReplicaStatus, Slo, Tokenized
from kvrelay.errors import InternalError
from kvrelay.rpc.convert import logprobs_from_pb, usage_from_pb
from kvrelay.types import FinishReason, Peer, Role, split_keys, unpack_ids
from kvrelay.v1 import common_pb2, router_pb2

FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CONTEXT: FinishReason.CONTEXT,
}
ROLES = {
    common_pb2.ROLE_PREFILL: Role.PREFILL,
    common_pb2.ROLE_DECODE: Role.DECODE,
    common_pb2.ROLE_BOTH: Role.BOTH,
}


def slo_to_pb(slo: Slo) -> common_pb2.Slo:
    """Return the message."""
    return common_pb2.Slo(ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms)


def part_from_pb(response: router_pb2.GenerateResponse) -> Part | None:
    """Return the part; None for one that only a newer client knows.

    Raises:
        InternalError: a finish without a reason.
    """
    event = response.WhichOneof("event")
    if event == "decision":
        return _decision(response.decision)
    if event == "delta":
        return _delta(response.delta)
    if event == "finish":
        return _finish(response.finish)
    return None


def status_from_pb(response: router_pb2.GetStatusResponse) -> FleetStatus:
    """Return the value."""
    return FleetStatus(
        state=response.state,
        policy=response.policy,
        disaggregate=response.disaggregate,
        block_tokens=response.block_tokens,
        replicas=tuple(_replica(replica) for replica in response.replicas),
    )


def models_from_pb(response: router_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """Return the values."""
    return tuple(
        ModelInfo(model=model.model, context_tokens=model.context_tokens, model_fingerprint=model.model_fingerprint)
        for model in response.models
    )


def tokenized_from_pb(response: router_pb2.TokenizeResponse) -> Tokenized:
    """Return the value."""
    return Tokenized(ids=tuple(unpack_ids(response.prompt_ids)), block_keys=tuple(split_keys(response.block_keys)))


def _decision(message: router_pb2.Decision) -> Decision:
    return Decision(
        request_id=message.request_id,
        attempt=message.attempt,
        model=message.model,
        decode=_peer(message.decode) if message.HasField("decode") else None,
        prefill=_peer(message.prefill) if message.HasField("prefill") else None,
        holder=_peer(message.holder) if message.HasField("holder") else None,
        reason=message.reason,
        decider_reason=message.decider_reason,
        policy=message.policy,
        prompt_tokens=message.prompt_tokens,
        available_tokens=message.available_tokens,
        prefill_cached_tokens=message.prefill_cached_tokens,
        decode_cached_tokens=message.decode_cached_tokens,
        seed=message.seed,
        queue_s=message.queue_s,
        inputs=dict(message.inputs),
    )


def _delta(message: router_pb2.Delta) -> Delta:
    return Delta(
        text=message.text,
        choice=message.choice,
        position=message.tokens.position,
        ids=tuple(unpack_ids(message.tokens.ids)),
        logprobs=tuple(logprobs_from_pb(entry) for entry in message.tokens.logprobs),
    )


def _finish(message: router_pb2.Finish) -> Finish:
    reason = FINISH_REASONS.get(message.reason)
    if reason is None:
        raise InternalError(f"the router ended the answer with unknown finish reason {message.reason}")
    return Finish(
        reason=reason,
        usage=usage_from_pb(message.usage),
        choice=message.choice,
        stop_string=message.stop_string,
        attempts=message.attempts,
        ttft_s=message.ttft_s,
        tpot_s=message.tpot_s,
        prefill=_peer(message.prefill) if message.HasField("prefill") else None,
        prefill_reason=message.prefill_reason,
    )


def _peer(message: common_pb2.Peer) -> Peer:
    return Peer(message.replica_id, message.incarnation, message.address)


def _replica(message: router_pb2.ReplicaStatus) -> ReplicaStatus:
    return ReplicaStatus(
        peer=_peer(message.peer),
        role=ROLES.get(message.role, Role.BOTH),
        model=message.model,
        state=message.state,
        prefill_load_s=message.prefill_load_s,
        decode_sequences=message.decode_sequences,
        decode_tokens=message.decode_tokens,
        blocks=message.blocks,
        pages_total=message.pages_total,
        pages_free=message.pages_free,
        pages_quarantined=message.pages_quarantined,
        leases=message.leases,
        running=message.running,
        waiting=message.waiting,
        steps=message.steps,
        heartbeat_age_s=message.heartbeat_age_s,
    )
