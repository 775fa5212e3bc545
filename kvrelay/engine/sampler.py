"""Chooses tokens from logits.

Random numbers are counter-based: a hash of (seed, position, token id) gives each candidate its own uniform number, and
the Gumbel-max trick (Gumbel, 1954: the largest of log p_i + G_i is i with probability p_i) turns these into one draw.
So a draw depends on nothing but the logits, the seed and the position: not on the batch, the process, or earlier draws.
"""

import math
from collections.abc import Sequence

import torch

from kvrelay.engine.runner import Draw, Drawn
from kvrelay.errors import InternalError
from kvrelay.types import Sampling, TokenLogprobs

TOP_P_CANDIDATES = 1024
"""Candidates sorted at first for top_p: they nearly always hold the mass, and sorting all 49,152 takes 3 ms."""

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Constants of splitmix64's output function (Steele, Lea and Flood, "Fast splittable pseudorandom number generators").
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFTS = (30, 27, 31)
_UNIFORM_BITS = 31
"""Bits of the hash that make a uniform number: enough that a token of probability 1e-9 is still drawn as often."""


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Choose one token a row.

    Args:
        logits: (n, vocabulary) float32; may be changed.
        draws: how to choose, one a row.

    Raises:
        InternalError: logits are not finite: the model is broken.
    """
    if not bool(torch.isfinite(logits).all()):
        raise InternalError("the model gave logits that are not finite; its weights or its KV are damaged")
    asked = {row: torch.log_softmax(logits[row], -1) for row, draw in enumerate(draws) if _logprobs(draw) is not None}
    for row, draw in enumerate(draws):
        if draw.min_tokens_left > 0 and draw.stop_ids:
            logits[row, sorted(draw.stop_ids)] = float("-inf")
    tokens = logits.argmax(-1).tolist()
    # Row by row: parameters differ between rows, and one row's numbers stay in the core's own cache.
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            tokens[row] = _draw(logits[row], draw)
    return [
        Drawn(token, _describe(asked[row], token, _logprobs(draws[row]) or 0) if row in asked else None)
        for row, token in enumerate(tokens)
    ]


def _logprobs(draw: Draw) -> int | None:
    return draw.sampling.logprobs


def _describe(logprobs: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    if not count:
        return TokenLogprobs(float(logprobs[token]))
    top = logprobs.topk(min(count, len(logprobs)))
    return TokenLogprobs(float(logprobs[token]), tuple(top.indices.tolist()), tuple(top.values.tolist()))


def _draw(logits: torch.Tensor, draw: Draw) -> int:
    seed = draw.sampling.seed
    if seed is None:
        raise InternalError("a draw with temperature came without a seed")
    scaled, ids = candidates(logits, draw.sampling)
    return int(ids[(scaled + gumbel(seed, draw.position, ids)).argmax()])


def candidates(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits over temperature, and the ids, of the tokens that may be drawn.

    Temperature comes first; then top_k; then top_p of what top_k left; min_p is relative to the likeliest token.
    """
    scaled = logits / sampling.temperature
    ids = torch.arange(len(scaled), device=scaled.device)
    if 0 < sampling.top_k < len(scaled):
        scaled, ids = scaled.topk(sampling.top_k)
    if sampling.top_p < 1:
        kept = _nucleus(scaled, sampling.top_p)
        scaled, ids = scaled[kept], ids[kept]
    if sampling.min_p > 0:
        likely = scaled >= scaled.max() + math.log(sampling.min_p)
        scaled, ids = scaled[likely], ids[likely]
    return scaled, ids


def _nucleus(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the indices of the fewest likeliest tokens that together have probability `top_p`."""
    total = scaled.logsumexp(-1)
    values, order = scaled.topk(min(TOP_P_CANDIDATES, len(scaled)))
    mass = (values - total).exp().cumsum(-1)
    if len(order) < len(scaled) and mass[-1] < top_p:
        values, order = scaled.sort(descending=True)
        mass = (values - total).exp().cumsum(-1)
    return order[: int((mass < top_p).sum()) + 1]


def gumbel(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """Return a standard Gumbel number for each token id, a function of (seed, position, id) alone."""
    key = _mix_int((_mix_int(seed) + position * _GOLDEN) & _U64)
    hashed = _mix(ids * _signed(_GOLDEN) + _signed(key))
    uniform = (_shifted(hashed, 64 - _UNIFORM_BITS).to(torch.float32) + 0.5) * 2.0**-_UNIFORM_BITS
    # log1p of the small end: winners have small exponentials, and there float32 is finest.
    return -torch.log(-torch.log1p(-uniform))


def _mix_int(value: int) -> int:
    first, second, third = _SHIFTS
    value = ((value ^ (value >> first)) * _MIX_1) & _U64
    value = ((value ^ (value >> second)) * _MIX_2) & _U64
    return value ^ (value >> third)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Do what `_mix_int` does, in wrapping int64; `values` is overwritten."""
    first, second, third = _SHIFTS
    values.bitwise_xor_(_shifted(values, first)).mul_(_signed(_MIX_1))
    values.bitwise_xor_(_shifted(values, second)).mul_(_signed(_MIX_2))
    return values.bitwise_xor_(_shifted(values, third))


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
