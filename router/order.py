"""What a request asks for once it is checked, and what follows from it for its replicas and its client. Pure."""

from dataclasses import dataclass, replace

from kvrelay.client.values import Decision
from kvrelay.engine.protocol import Prompt
from kvrelay.rpc.decode_client import DecodeOrder
from kvrelay.types import Holder, Sampling, TokenArray, pack_ids
from router.dispatch import Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A client's request, checked and tokenized.

    Attributes:
        sampling: with seed and max_tokens.
        wanted_tokens: max_tokens as the client gave it; None: what the context leaves.
        first_attempt: attempts made before, by another router.
    """

    request_id: str
    model: str
    prompt_ids: TokenArray
    sampling: Sampling
    wanted_tokens: int | None = None
    first_attempt: int = 0
    priority: int = 0
    salt: str = ""
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None


def decode_order(order: Order, placed: Placed, *, attempt: int, output_ids: TokenArray) -> DecodeOrder:
    """Return what the decode replica is asked for."""
    choice = placed.choice
    return DecodeOrder(
        request_id=order.request_id,
        attempt=attempt,
        prompt=Prompt(
            prompt_ids=pack_ids(order.prompt_ids),
            output_ids=pack_ids(output_ids),
            root_key=placed.root,
            block_keys=placed.keys,
        ),
        sampling=replace(order.sampling, stop_strings=()),  # replicas know no text
        targets=placed.targets,
        holder=Holder(choice.holder.peer, placed.holder_blocks) if choice.holder else None,
        priority=order.priority,
        incarnation=choice.decode.peer.incarnation,
        ttft_slo_ms=order.ttft_slo_ms,
        tpot_slo_ms=order.tpot_slo_ms,
    )


def decision(order: Order, placed: Placed, *, attempt: int, policy: str) -> Decision:
    """Return what the client is told of where its request goes."""
    choice, prefixes = placed.choice, placed.prefixes
    prefill = choice.prefill.peer if choice.prefill else None
    return Decision(
        request_id=order.request_id,
        attempt=attempt,
        model=order.model,
        decode=choice.decode.peer,
        prefill=prefill,
        reason=choice.reason,
        decider_reason=choice.decider_reason,
        policy=policy,
        prompt_tokens=len(order.prompt_ids),
        available_tokens=prefixes.most,
        prefill_cached_tokens=prefixes.of(prefill),
        decode_cached_tokens=prefixes.of(choice.decode.peer),
        seed=order.sampling.seed or 0,
        queue_s=0.0,  # nothing waits in the router yet
        holder=choice.holder.peer if choice.holder else None,
        inputs=placed.inputs,
    )
