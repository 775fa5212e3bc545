"""Opens model files as one kind of checkpoint, whatever their format."""

from kvrelay.engine.loader.checkpoint import Checkpoint
from kvrelay.errors import InvalidArgument
from kvrelay.model.files import ModelFiles

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open the weights of a model.

    Raises:
        InvalidArgument: the files are damaged, or of a kind that holds no weights.
    """
    if files.kind == "gguf":
        from kvrelay.engine.loader.gguf_file import GgufCheckpoint  # noqa: PLC0415 - each kind loads only what it needs

        return GgufCheckpoint(files.path)
    if files.kind == "hf":
        from kvrelay.engine.loader.safetensors_dir import SafetensorsCheckpoint  # noqa: PLC0415

        return SafetensorsCheckpoint(files.path)
    raise InvalidArgument("model", f"{files.alias!r} has no weights; it runs with --engine mock only")
