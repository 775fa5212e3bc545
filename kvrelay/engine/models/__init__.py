"""Models, by the architecture their checkpoints name."""

from collections.abc import Callable

import torch

from kvrelay.engine.loader import Checkpoint
from kvrelay.engine.models.interface import KvShape, Model
from kvrelay.engine.models.llama import Llama
from kvrelay.errors import InvalidArgument

__all__ = ["KvShape", "Model", "load_model"]

Loader = Callable[[Checkpoint, torch.dtype, torch.device], Model]

_LOADERS: dict[str, Loader] = {"LlamaForCausalLM": Llama.load}


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Model:
    """Load the model that a checkpoint is of.

    Raises:
        InvalidArgument: the architecture, or something the configuration asks for, is not supported; names it.
    """
    loader = _LOADERS.get(checkpoint.architecture)
    if loader is None:
        known = ", ".join(_LOADERS)
        raise InvalidArgument("model", f"architecture {checkpoint.architecture!r} is not supported; supported: {known}")
    return loader(checkpoint, dtype, device)
