"""Reads a model's weights out of a checkpoint, and notices what was not read."""

import torch

from kvrelay.engine.loader import Checkpoint
from kvrelay.engine.models.linear import Linear
from kvrelay.errors import InvalidArgument

IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""A buffer that old checkpoints hold; it follows from the configuration."""


class Weights:
    """A checkpoint's tensors, checked for shape, in the dtype and on the device of the model."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._used: set[str] = set()

    def read(self, module: str, *shape: int) -> torch.Tensor:
        """Read the weight of a module.

        Raises:
            InvalidArgument: it is missing, or has another shape.
        """
        return self._read(module, shape, self._dtype)

    def read_norm(self, module: str, size: int) -> torch.Tensor:
        """Read the weight of a norm, in float32."""
        return self._read(module, (size,), torch.float32)

    def linear(self, *parts: tuple[str, int, int]) -> Linear:
        """Read several (module, outputs, inputs) as one linear layer that computes them all."""
        return Linear(torch.cat([self.read(*part) for part in parts]))

    def stored(self, name: str) -> torch.Tensor:
        """Read a tensor as it is stored."""
        self._used.add(name)
        return self._checkpoint.tensor(name)

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        """Refuse a checkpoint that holds more than was read.

        Raises:
            InvalidArgument: names what would be left out, such as biases.
        """
        left = self._checkpoint.names - self._used - ignore
        unused = sorted(name for name in left if not name.endswith(IGNORED_SUFFIX))
        if unused:
            shown = ", ".join(unused[:3])
            raise InvalidArgument("model", f"it has {len(unused)} tensors that are not supported, such as {shown}")

    def _read(self, module: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        stored = self.stored(f"{module}.weight")
        if stored.shape != shape:
            raise InvalidArgument("model", f"{module}.weight is {tuple(stored.shape)}, its configuration says {shape}")
        # A copy, also where nothing changes: a view of a mapped file would be paged in during the first requests.
        return stored.to(self.device, dtype, copy=True)
