"""What the models read weights from."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch


class Checkpoint(Protocol):
    """Weights and configuration under the names of Hugging Face's Llama family, whatever the file format.

    Attributes:
        architecture: name of the model class, such as "LlamaForCausalLM".
        config: the fields of config.json.
        names: the tensors held.
    """

    architecture: str
    config: dict[str, Any]
    names: frozenset[str]

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor, in its stored float type or dequantised to float32; rows are outputs.

        Raises:
            InvalidArgument: there is no such tensor, or its type is not supported.
        """
        ...

    def digest(self) -> str:
        """Return the SHA-256 of all weights as stored, as hex."""
        ...


def digest_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 over the contents of files, in the order given, as hex."""
    digests = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digests.update(hashlib.file_digest(file, "sha256").digest())
    return digests.hexdigest()
