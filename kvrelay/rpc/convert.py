"""Between kvrelay's values and protobuf messages. Pure.

Functions come in pairs, `x_to_pb` and `x_from_pb`; what comes from the wire is checked where a wrong value would do
harm further in. `name` arguments say which field an error blames.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvrelay.errors import InvalidArgument
from kvrelay.types import (
    FinishReason,
    KvLayout,
    ModelIdentity,
    Peer,
    Replica,
    ReplicaState,
    Role,
    Sampling,
    TokenLogprobs,
    Usage,
    pack_ids,
    unpack_ids,
)
from kvrelay.v1 import common_pb2, kv_registry_pb2

_ROLES = {
    Role.PREFILL: common_pb2.ROLE_PREFILL,
    Role.DECODE: common_pb2.ROLE_DECODE,
    Role.BOTH: common_pb2.ROLE_BOTH,
}
_ROLES_BACK = {pb: role for role, pb in _ROLES.items()}

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT: common_pb2.FINISH_REASON_CONTEXT,
}
_REASONS_BACK = {pb: reason for reason, pb in _REASONS.items()}


_M = TypeVar("_M", bound=Message)
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Consecutive output tokens of one attempt; `position` is the absolute position of the first."""

    attempt: int
    position: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0


def role_to_pb(role: Role) -> common_pb2.Role.ValueType:
    """Return the wire's role."""
    return _ROLES[role]


def role_from_pb(pb: common_pb2.Role.ValueType, *, name: str = "role") -> Role:
    """Return the role.

    Raises:
        InvalidArgument: not given, or not known to this version.
    """
    if pb not in _ROLES_BACK:
        raise InvalidArgument(name, f"role {pb} is none of {', '.join(Role)}")
    return _ROLES_BACK[pb]


def finish_reason_to_pb(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """Return the wire's finish reason; None becomes "not ended"."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _REASONS[reason]


def finish_reason_from_pb(pb: common_pb2.FinishReason.ValueType, *, name: str = "finish_reason") -> FinishReason | None:
    """Return the finish reason, None for "not ended".

    Raises:
        InvalidArgument: not known to this version.
    """
    if pb == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    if pb not in _REASONS_BACK:
        raise InvalidArgument(name, f"finish reason {pb} is none of {', '.join(FinishReason)}")
    return _REASONS_BACK[pb]


def sampling_to_pb(sampling: Sampling) -> common_pb2.Sampling:
    """Return the wire's sampling, every field given."""
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_ids=pack_ids(sampling.stop_ids),
        stop_strings=sampling.stop_strings,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
    )


def sampling_from_pb(pb: common_pb2.Sampling) -> Sampling:
    """Return the sampling, checked; absent fields get the protocol's defaults.

    Raises:
        InvalidArgument: a field is out of range or not served.
    """
    _refuse_unserved(pb)
    sampling = Sampling(
        temperature=pb.temperature if pb.HasField("temperature") else 0.0,
        top_k=pb.top_k,
        top_p=pb.top_p if pb.HasField("top_p") else 1.0,
        min_p=pb.min_p,
        seed=pb.seed if pb.HasField("seed") else None,
        max_tokens=pb.max_tokens if pb.HasField("max_tokens") else None,
        min_tokens=pb.min_tokens,
        stop_ids=tuple(unpack_ids(pb.stop_ids, name="sampling.stop_ids")),
        stop_strings=tuple(pb.stop_strings),
        ignore_eos=pb.ignore_eos,
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
    )
    sampling.validate()
    return sampling


def _refuse_unserved(pb: common_pb2.Sampling) -> None:
    unserved = {
        "n": pb.HasField("n") and pb.n != 1,
        "prompt_logprobs": pb.HasField("prompt_logprobs"),
        "repetition_penalty": pb.HasField("repetition_penalty") and pb.repetition_penalty != 1,
        "presence_penalty": pb.presence_penalty != 0,
        "frequency_penalty": pb.frequency_penalty != 0,
        "logit_bias": bool(pb.logit_bias),
        "grammar": pb.HasField("grammar"),
    }
    for field, given in unserved.items():
        if given:
            raise InvalidArgument(f"sampling.{field}", "not served by this version; leave it out")


def logprobs_to_pb(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Return the wire's log-probabilities (rounded to float32)."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob, top_ids=pack_ids(logprobs.top_ids), top_logprobs=logprobs.top_logprobs
    )


def logprobs_from_pb(pb: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """Return the log-probabilities.

    Raises:
        InvalidArgument: not one log-probability for each id.
    """
    top_ids = tuple(unpack_ids(pb.top_ids, name="logprobs.top_ids"))
    if len(top_ids) != len(pb.top_logprobs):
        raise InvalidArgument("logprobs.top_logprobs", f"{len(pb.top_logprobs)} for {len(top_ids)} ids")
    return TokenLogprobs(pb.logprob, top_ids, tuple(pb.top_logprobs))


def span_to_pb(span: TokenSpan) -> common_pb2.TokenSpan:
    """Return the wire's span."""
    return common_pb2.TokenSpan(
        attempt=span.attempt,
        choice=span.choice,
        position=span.position,
        ids=pack_ids(span.ids),
        logprobs=[logprobs_to_pb(each) for each in span.logprobs],
    )


def span_from_pb(pb: common_pb2.TokenSpan) -> TokenSpan:
    """Return the span.

    Raises:
        InvalidArgument: log-probabilities are given, but not one for each token.
    """
    ids = tuple(unpack_ids(pb.ids, name="tokens.ids"))
    if pb.logprobs and len(pb.logprobs) != len(ids):
        raise InvalidArgument("tokens.logprobs", f"{len(pb.logprobs)} for {len(ids)} tokens")
    return TokenSpan(
        attempt=pb.attempt,
        choice=pb.choice,
        position=pb.position,
        ids=ids,
        logprobs=tuple(logprobs_from_pb(each) for each in pb.logprobs),
    )


def identity_to_pb(identity: ModelIdentity) -> common_pb2.ModelIdentity:
    """Return the wire's identity."""
    return common_pb2.ModelIdentity(
        model=identity.model,
        model_fingerprint=identity.model_fingerprint,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        block_tokens=identity.block_tokens,
        key_version=identity.key_version,
        golden_keys=identity.golden_keys,
        protocol=common_pb2.ProtocolVersion(major=identity.protocol_major, minor=identity.protocol_minor),
        context_tokens=identity.context_tokens,
    )


def identity_from_pb(pb: common_pb2.ModelIdentity) -> ModelIdentity:
    """Return the identity; whether it agrees with another is not checked here."""
    return ModelIdentity(
        model=pb.model,
        model_fingerprint=pb.model_fingerprint,
        tokenizer_fingerprint=pb.tokenizer_fingerprint,
        block_tokens=pb.block_tokens,
        context_tokens=pb.context_tokens,
        golden_keys=pb.golden_keys,
        key_version=pb.key_version,
        protocol_major=pb.protocol.major,
        protocol_minor=pb.protocol.minor,
    )


def layout_to_pb(layout: KvLayout) -> common_pb2.KvLayout:
    """Return the wire's layout."""
    return _message(layout, common_pb2.KvLayout)


def layout_from_pb(pb: common_pb2.KvLayout) -> KvLayout:
    """Return the layout; whether it agrees with another is not checked here."""
    return _value(pb, KvLayout)


def peer_to_pb(peer: Peer) -> common_pb2.Peer:
    """Return the wire's peer."""
    return _message(peer, common_pb2.Peer)


def peer_from_pb(pb: common_pb2.Peer, *, name: str = "peer") -> Peer:
    """Return the peer.

    Raises:
        InvalidArgument: it names no replica, or no incarnation of it.
    """
    if not pb.replica_id:
        raise InvalidArgument(f"{name}.replica_id", "must not be empty")
    if not pb.incarnation:
        raise InvalidArgument(f"{name}.incarnation", "must not be empty")
    return _value(pb, Peer)


def usage_to_pb(usage: Usage) -> common_pb2.Usage:
    """Return the wire's usage."""
    return _message(usage, common_pb2.Usage)


def usage_from_pb(pb: common_pb2.Usage) -> Usage:
    """Return the usage."""
    return _value(pb, Usage)


def replica_to_pb(replica: Replica) -> kv_registry_pb2.Replica:
    """Return the wire's replica; its state travels in heartbeats, not here."""
    return kv_registry_pb2.Replica(
        peer=peer_to_pb(replica.peer),
        role=role_to_pb(replica.role),
        identity=identity_to_pb(replica.identity),
        layout=layout_to_pb(replica.layout),
        pages=replica.pages,
        max_sequences=replica.max_sequences,
        weight=replica.weight,
        epoch=replica.epoch,
        draining=replica.draining,
    )


def replica_from_pb(pb: kv_registry_pb2.Replica) -> Replica:
    """Return the replica, with an empty state.

    Raises:
        InvalidArgument: peer, role or weight make no sense.
    """
    if not (math.isfinite(pb.weight) and pb.weight > 0):
        raise InvalidArgument("replica.weight", f"{pb.weight} is not a finite number above 0")
    return Replica(
        peer=peer_from_pb(pb.peer, name="replica.peer"),
        role=role_from_pb(pb.role, name="replica.role"),
        identity=identity_from_pb(pb.identity),
        layout=layout_from_pb(pb.layout),
        pages=pb.pages,
        max_sequences=pb.max_sequences,
        weight=pb.weight,
        epoch=pb.epoch,
        draining=pb.draining,
    )


def replica_state_to_pb(state: ReplicaState) -> kv_registry_pb2.ReplicaState:
    """Return the wire's state."""
    return _message(state, kv_registry_pb2.ReplicaState)


def replica_state_from_pb(pb: kv_registry_pb2.ReplicaState) -> ReplicaState:
    """Return the state."""
    return _value(pb, ReplicaState)


def _message(value: Any, kind: type[_M]) -> _M:
    """Copy a dataclass into the message that has the same fields."""
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)})


def _value(pb: Message, kind: type[_V]) -> _V:
    """Copy a message into the dataclass that has the same fields."""
    return kind(**{field.name: getattr(pb, field.name) for field in fields(kind)})  # type: ignore[arg-type] # a dataclass
