"""A linear layer without bias."""

from typing import Any

import torch
from torch.nn import functional

PACKED_ROWS = 8
"""Batch rows that oneDNN lays packed weights out for; one layout serves 1 to 256 rows equally well."""


class Linear:
    """Multiplies by weights of (outputs, inputs).

    In bfloat16 on a CPU the weights are kept in oneDNN's own layout: 1.5 times as fast as from rows, for one row as
    for 256, because the library otherwise lays them out anew in every call.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = _pack(weight)
        self._weight = weight if self._packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, outputs) for (rows, inputs)."""
        if self._packed is None:
            assert self._weight is not None
            return functional.linear(x, self._weight)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")  # noqa: SLF001
        return result


def _pack(weight: torch.Tensor) -> Any:
    """Lay weights out for oneDNN; None where that is not to be had.

    The two operators are those torch.compile itself emits for the CPU; torch has no other name for them.
    """
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return None
