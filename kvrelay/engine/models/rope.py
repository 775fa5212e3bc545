"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), halves of a head against each other."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.errors import InvalidArgument

BASE_DEFAULT = 10_000.0
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters.

    Attributes:
        base: frequency i of n is base ** (-i / n).
        divisors: one a frequency, which it is divided by; empty: none.
    """

    base: float
    divisors: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], head_dim: int) -> "Rope":
        """Read the parameters from a Hugging Face configuration, of transformers 5 or older.

        Raises:
            InvalidArgument: a kind of scaling that is not supported.
        """
        scaling: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
        base = float(scaling.get("rope_theta") or config.get("rope_theta") or BASE_DEFAULT)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return cls(base)
        if kind == "llama3":
            return cls(base, _llama3_divisors(frequencies(base, head_dim).tolist(), scaling))
        raise InvalidArgument("model", f"RoPE scaling {kind!r} is not supported; supported: default, llama3")


def frequencies(base: float, head_dim: int) -> torch.Tensor:
    """Return the (head_dim / 2,) frequencies in radians a token, float32 as the models were trained with."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (base**exponents)


def _llama3_divisors(rates: list[float], scaling: Mapping[str, Any]) -> tuple[float, ...]:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended (Llama 3.1 model card)."""
    missing = [name for name in _LLAMA3_FIELDS if name not in scaling]
    if missing:
        raise InvalidArgument("model", f"its RoPE scaling llama3 has no {missing[0]}")
    factor, low, high, context = (float(scaling[name]) for name in _LLAMA3_FIELDS)

    def divisor(rate: float) -> float:
        turns = context * rate / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        return 1.0 / ((1 - blend) / factor + blend)

    return tuple(divisor(rate) for rate in rates)


class RotaryTable:
    """Cosines and signed sines of every position, float32, made once.

    Args:
        rope: parameters.
        head_dim: size of a head.
        positions: positions needed; the model's context.
        device: where the table lies.
    """

    def __init__(self, rope: Rope, head_dim: int, positions: int, device: torch.device) -> None:
        rates = frequencies(rope.base, head_dim)
        if rope.divisors:
            rates = rates / torch.tensor(rope.divisors)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), rates)
        cos, sin = angles.cos(), angles.sin()
        self._half = head_dim // 2
        self._cos = torch.cat((cos, cos), dim=-1).to(device)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of a batch, (T, 1, head_dim) each."""
        return self._cos[positions, None], self._sin[positions, None]

    def rotate_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate (T, heads, head_dim) in place; computed in float32."""
        heads.copy_(torch.addcmul(heads * cos, heads.roll(self._half, -1), sin))
