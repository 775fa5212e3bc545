"""Predicted costs of a pair, in seconds."""

from typing import Final

from router.policy.values import Ask, Candidate, Cost

REMOTE_OVERHEAD_S: Final = 0.015
"""What a hand-off costs beside the bytes: one call to start, one to confirm, and their turns in two engines' loops."""

PULL_BYTES_PER_S: Final = 1e9
"""NIXL over TCP between two hosts, rounded down; shared memory and RDMA are faster."""

HARM_SHARE: Final = 0.5
"""A second's delay of a running stream against a second's delay of an answer that has not begun: readers have text to
read meanwhile."""

SEQUENCE_STEP_SHARE: Final = 0.1
"""How much longer a decode step gets with one more sequence of ordinary length, as a share of it."""


def local_cost(ask: Ask, decode: Candidate) -> Cost:
    """Predict the cost of reading the prompt where it will be decoded."""
    compute_s = _compute_s(ask, decode)
    return Cost(
        queue_s=decode.load.prefill_s,
        compute_s=compute_s,
        harm_s=_harm_s(decode, compute_s),
        decode_s=_decode_s(ask, decode),
    )


def remote_cost(ask: Ask, decode: Candidate, prefill: Candidate) -> Cost:
    """Predict the cost of reading the prompt at `prefill` and pulling its KV to `decode`."""
    compute_s = _compute_s(ask, prefill)
    pulled_tokens = max(0, ask.prompt_tokens - decode.held_tokens)
    return Cost(
        queue_s=prefill.load.prefill_s,
        compute_s=compute_s,
        pull_s=REMOTE_OVERHEAD_S + pulled_tokens * decode.kv_bytes_per_token / PULL_BYTES_PER_S,
        harm_s=_harm_s(prefill, compute_s),
        decode_s=_decode_s(ask, decode),
    )


def _compute_s(ask: Ask, reader: Candidate) -> float:
    # The last token is always computed: its logits are needed.
    return max(1, ask.prompt_tokens - reader.held_tokens) / reader.prefill_tokens_per_s


def _harm_s(reader: Candidate, compute_s: float) -> float:
    return HARM_SHARE * compute_s * reader.load.sequences


def _decode_s(ask: Ask, decode: Candidate) -> float:
    """Predict how much longer the answer takes than at an idle replica."""
    writing_s = ask.output_tokens * decode.step_s
    slowed_s = writing_s * SEQUENCE_STEP_SHARE * decode.load.decode / decode.weight
    over = max(0, decode.load.sequences + 1 - decode.max_sequences)
    return slowed_s + writing_s * over / decode.max_sequences
