"""Between the router's values and the messages of router.proto. Pure.

What a router tells are the values that its clients get (`kvrelay.client.values`).
"""

import math
from dataclasses import dataclass
from typing import Final

from kvrelay.client.values import Decision, Delta, Finish, FleetStatus, ModelInfo, Part, ReplicaStatus, Tokenized
from kvrelay.errors import InvalidArgument
from kvrelay.rpc import convert
from kvrelay.rpc.convert import TokenSpan
from kvrelay.types import Peer, Sampling, TokenArray, pack_ids, unpack_ids
from kvrelay.v1 import common_pb2, router_pb2

PRIORITY_MAX: Final = 100
"""Priorities reach from minus this to this."""

REQUEST_ID_CHARACTERS_MAX: Final = 128
"""Longer ids would crowd every log line and header."""

NAME_CHARACTERS_MAX: Final = 256
"""Bound of sessions, tenants and salts, which are kept and hashed but never read."""


@dataclass(frozen=True, slots=True)
class Continued:
    """An answer that another router had begun: its output so far, seed, and attempts made."""

    request_id: str
    output_ids: TokenArray
    seed: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateAsk:
    """A client's request, checked as far as it can be without knowing the model.

    Attributes:
        model: alias; empty: the only one served.
        prompt: text, a chat as (role, content) pairs, or token ids.
        request_id: empty: to be drawn.
        ttft_slo_ms, tpot_slo_ms: None: no promise wished for.
    """

    model: str
    prompt: "str | tuple[tuple[str, str], ...] | TokenArray"
    sampling: Sampling
    priority: int = 0
    session: str = ""
    tenant: str = ""
    continued: Continued | None = None
    request_id: str = ""
    return_ids: bool = False
    cache_salt: str = ""
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None


def ask_from_pb(pb: router_pb2.GenerateRequest) -> GenerateAsk:
    """Return a client's request.

    Raises:
        InvalidArgument: names the field and the limit.
    """
    _check_names(pb)
    if pb.adapter:
        raise InvalidArgument("adapter", f"{pb.adapter!r} is not served; leave it empty")
    if not -PRIORITY_MAX <= pb.priority <= PRIORITY_MAX:
        raise InvalidArgument("priority", f"{pb.priority} is not in [{-PRIORITY_MAX}, {PRIORITY_MAX}]")
    return GenerateAsk(
        model=pb.model,
        prompt=prompt_from_pb(pb),
        sampling=convert.sampling_from_pb(pb.sampling),
        priority=pb.priority,
        session=pb.session,
        tenant=pb.tenant,
        continued=_continued(pb.continuation) if pb.HasField("continuation") else None,
        request_id=pb.request_id,
        return_ids=pb.return_ids,
        cache_salt=pb.cache_salt,
        ttft_slo_ms=_slo(pb.slo, "ttft_ms"),
        tpot_slo_ms=_slo(pb.slo, "tpot_ms"),
    )


def prompt_from_pb(
    pb: router_pb2.GenerateRequest | router_pb2.TokenizeRequest,
) -> "str | tuple[tuple[str, str], ...] | TokenArray":
    """Return the prompt: text, chat or token ids.

    Raises:
        InvalidArgument: there is none, or it is empty.
    """
    match pb.WhichOneof("prompt"):
        case "text":
            if not pb.text:
                raise InvalidArgument("text", "must not be empty")
            return pb.text
        case "chat":
            if not pb.chat.messages:
                raise InvalidArgument("chat.messages", "none given, at least one")
            return tuple((message.role, message.content) for message in pb.chat.messages)
        case "prompt_ids" if isinstance(pb, router_pb2.GenerateRequest):
            if not pb.prompt_ids:
                raise InvalidArgument("prompt_ids", "must not be empty")
            return unpack_ids(pb.prompt_ids, name="prompt_ids")
        case _:
            raise InvalidArgument("prompt", "none given; give text, chat or prompt_ids")


def part_to_pb(part: Part) -> router_pb2.GenerateResponse:
    """Return the wire's part of an answer."""
    match part:
        case Decision():
            return router_pb2.GenerateResponse(decision=_decision_to_pb(part))
        case Delta():
            return router_pb2.GenerateResponse(delta=_delta_to_pb(part))
        case Finish():
            return router_pb2.GenerateResponse(finish=_finish_to_pb(part))


def status_to_pb(status: FleetStatus) -> router_pb2.GetStatusResponse:
    """Return the wire's state of the fleet."""
    return router_pb2.GetStatusResponse(
        state=status.state,
        replicas=[_replica_to_pb(replica) for replica in status.replicas],
        policy=status.policy,
        disaggregate=status.disaggregate,
        block_tokens=status.block_tokens,
    )


def model_to_pb(model: ModelInfo) -> router_pb2.Model:
    """Return the wire's model."""
    return router_pb2.Model(
        model=model.model, context_tokens=model.context_tokens, model_fingerprint=model.model_fingerprint
    )


def tokenized_to_pb(tokenized: Tokenized) -> router_pb2.TokenizeResponse:
    """Return the wire's token ids and block keys of a text."""
    return router_pb2.TokenizeResponse(prompt_ids=pack_ids(tokenized.ids), block_keys=b"".join(tokenized.block_keys))


def _check_names(pb: router_pb2.GenerateRequest) -> None:
    bounds = {
        "session": NAME_CHARACTERS_MAX,
        "tenant": NAME_CHARACTERS_MAX,
        "cache_salt": NAME_CHARACTERS_MAX,
        "request_id": REQUEST_ID_CHARACTERS_MAX,
    }
    for name, most in bounds.items():
        if len(getattr(pb, name)) > most:
            raise InvalidArgument(name, f"{len(getattr(pb, name))} characters, at most {most}")
    _check_request_id("request_id", pb.request_id)


def _check_request_id(name: str, request_id: str) -> None:
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidArgument(name, "only printable ASCII characters")


def _continued(pb: router_pb2.Continuation) -> Continued:
    if not pb.request_id or len(pb.request_id) > REQUEST_ID_CHARACTERS_MAX:
        raise InvalidArgument("continuation.request_id", f"1 to {REQUEST_ID_CHARACTERS_MAX} characters")
    _check_request_id("continuation.request_id", pb.request_id)
    ids = unpack_ids(pb.output_ids, name="continuation.output_ids")
    return Continued(pb.request_id, ids, pb.seed, pb.attempt)


def _slo(pb: common_pb2.Slo, name: str) -> float | None:
    if not pb.HasField(name):  # type: ignore[arg-type] # the stub knows literal names only
        return None
    value: float = getattr(pb, name)
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgument(f"slo.{name}", f"{value} is not a finite number above 0")
    return value


def _decision_to_pb(decision: Decision) -> router_pb2.Decision:
    return router_pb2.Decision(
        request_id=decision.request_id,
        attempt=decision.attempt,
        model=decision.model,
        decode=_peer_to_pb(decision.decode),
        prefill=_peer_to_pb(decision.prefill),
        reason=decision.reason,
        decider_reason=decision.decider_reason,
        policy=decision.policy,
        prompt_tokens=decision.prompt_tokens,
        available_tokens=decision.available_tokens,
        prefill_cached_tokens=decision.prefill_cached_tokens,
        decode_cached_tokens=decision.decode_cached_tokens,
        seed=decision.seed,
        inputs=dict(decision.inputs),
        queue_s=decision.queue_s,
        holder=_peer_to_pb(decision.holder),
    )


def _peer_to_pb(peer: Peer | None) -> common_pb2.Peer | None:
    return None if peer is None else convert.peer_to_pb(peer)


def _delta_to_pb(delta: Delta) -> router_pb2.Delta:
    message = router_pb2.Delta(choice=delta.choice, text=delta.text)
    if delta.ids:
        span = TokenSpan(
            attempt=0, choice=delta.choice, position=delta.position, ids=delta.ids, logprobs=delta.logprobs
        )
        message.tokens.CopyFrom(convert.span_to_pb(span))
    return message


def _finish_to_pb(finish: Finish) -> router_pb2.Finish:
    return router_pb2.Finish(
        choice=finish.choice,
        reason=convert.finish_reason_to_pb(finish.reason),
        stop_string=finish.stop_string,
        usage=convert.usage_to_pb(finish.usage),
        attempts=finish.attempts,
        ttft_s=finish.ttft_s,
        tpot_s=finish.tpot_s,
        prefill=_peer_to_pb(finish.prefill),
        prefill_reason=finish.prefill_reason,
    )


def _replica_to_pb(replica: ReplicaStatus) -> router_pb2.ReplicaStatus:
    return router_pb2.ReplicaStatus(
        peer=convert.peer_to_pb(replica.peer),
        role=convert.role_to_pb(replica.role),
        model=replica.model,
        state=replica.state,
        prefill_load_s=replica.prefill_load_s,
        decode_sequences=replica.decode_sequences,
        decode_tokens=replica.decode_tokens,
        blocks=replica.blocks,
        pages_total=replica.pages_total,
        pages_free=replica.pages_free,
        leases=replica.leases,
        pages_quarantined=replica.pages_quarantined,
        running=replica.running,
        waiting=replica.waiting,
        steps=replica.steps,
        heartbeat_age_s=replica.heartbeat_age_s,
    )
