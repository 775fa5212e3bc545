"""A Hugging Face directory as a checkpoint: config.json and one or more .safetensors files."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.engine.loader.checkpoint import digest_files
from kvrelay.errors import InvalidArgument

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """Weights of a Hugging Face directory, mapped into memory.

    Raises:
        InvalidArgument: a file is missing or damaged; names it.
    """

    def __init__(self, folder: Path) -> None:
        self.config = _json(folder / "config.json")
        self.architecture = str((self.config.get("architectures") or [""])[0])
        self._paths = _weight_files(folder)
        self._files = [_open(path) for path in self._paths]
        self._holders = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict
        self.names = frozenset(self._holders)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor; see `Checkpoint.tensor`."""
        if name not in self._holders:
            raise InvalidArgument("model", f"{self._paths[0].parent} has no tensor {name}")
        tensor: torch.Tensor = self._holders[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise InvalidArgument("model", f"{name} is stored as {tensor.dtype}: quantised weights are not supported")
        return tensor

    def digest(self) -> str:
        """Return the SHA-256 over the weight files, in the order of their names."""
        return digest_files(self._paths)


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        return [folder / SINGLE]
    weight_map = _json(folder / INDEX)["weight_map"]
    return [folder / name for name in sorted(set(weight_map.values()))]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise InvalidArgument("model", f"{path} is missing") from error
    except SafetensorError as error:
        raise InvalidArgument("model", f"{path} is damaged: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument("model", f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidArgument("model", f"{path} is not a JSON object")
    return parsed
