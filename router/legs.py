"""From a policy's choices to what is booked: prices and caps of both legs. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from kvrelay.directory import Leg, Pair
from router.policy.cap import decode_cap, decode_measure, prefill_cap_s
from router.policy.values import TOKENS_PER_SEQUENCE, Ask, Candidate, Candidates, Choice


def with_last_resort(choices: Sequence[Choice]) -> list[Choice]:
    """Add the least loaded pair once more, without cap: a request is booked somewhere, whatever others booked."""
    ranked = list(choices)
    if any(choice.capped for choice in ranked):
        idlest = min(ranked, key=lambda choice: (decode_measure(choice.decode), choice.reader.load.prefill_s))
        ranked.append(replace(idlest, capped=False, reason="overloaded"))
    return ranked


def pairs_of(choices: Sequence[Choice], ask: Ask, candidates: Candidates) -> list[Pair]:
    """Return one pair to book a choice, in order.

    The cap is on the load before a request is added, while the registry checks the sum: a leg's own price is on top.
    """
    decode_most = decode_cap(candidates.decoders, ask)
    remote_most_s = prefill_cap_s(candidates.readers(), ask.epsilon)
    local_most_s = prefill_cap_s(candidates.decoders, ask.epsilon)
    return [_pair(choice, ask, decode_most, remote_most_s if choice.prefill else local_most_s) for choice in choices]


def _pair(choice: Choice, ask: Ask, decode_most: float, prefill_most_s: float) -> Pair:
    read_s = choice.cost.compute_s
    cap_s = prefill_most_s + read_s if choice.capped else 0.0
    decode = _decode_leg(choice.decode, ask, decode_most if choice.capped else None)
    if choice.prefill is None:
        return Pair(replace(decode, prefill_s=read_s, cap_prefill_s=cap_s))
    return Pair(decode, Leg(peer=choice.prefill.peer, prefill_s=read_s, cap_prefill_s=cap_s))


def _decode_leg(decode: Candidate, ask: Ask, most: float | None) -> Leg:
    leg = Leg(peer=decode.peer, tokens=ask.load.tokens, sequences=ask.load.sequences)
    if most is None:
        return leg
    # The policy's cap is on sequences and tokens together; either alone must stay below it too.
    room = most * decode.weight
    return replace(
        leg,
        cap_sequences=math.floor(room) + leg.sequences,
        cap_tokens=math.floor(room * TOKENS_PER_SEQUENCE) + leg.tokens,
    )
