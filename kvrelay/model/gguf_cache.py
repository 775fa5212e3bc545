"""Keeps the text side of a GGUF file beside the fetched models: reading 49,152 tokens out of the file takes 2 s."""

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from kvrelay.model.files import cache_folder
from kvrelay.model.text import TextModel

FORMAT = 1
"""Raised whenever what is derived from a file changes."""


def cached_gguf_text(path: Path) -> TextModel:
    """Return `gguf_text(path)`, from the cache folder when this very file (path, size, time) was read before."""
    entry = _entry(path)
    kept = _read(entry)
    if kept is not None:
        return kept
    from kvrelay.model.gguf_text import gguf_text  # noqa: PLC0415 - imports gguf, which a kept entry does not need

    text = gguf_text(path)
    _write(entry, text)
    return text


def _entry(path: Path) -> Path:
    stat = path.stat()
    name = f"{FORMAT}|{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    return cache_folder() / "text" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def _read(entry: Path) -> TextModel | None:
    try:
        fields = json.loads(entry.read_text())
        fields["tokenizer"] = Tokenizer.from_str(fields["tokenizer"])
        fields["eos_ids"] = tuple(fields["eos_ids"])
        return TextModel(**fields)
    except Exception:  # noqa: BLE001 - missing, torn or of another version (tokenizers raises plain Exception): a miss
        return None


def _write(entry: Path, text: TextModel) -> None:
    fields = {field.name: getattr(text, field.name) for field in dataclasses.fields(text)}
    fields["tokenizer"] = text.tokenizer.to_str()
    entry.parent.mkdir(parents=True, exist_ok=True)
    handle, staged = tempfile.mkstemp(dir=entry.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(fields, file)
    Path(staged).replace(entry)
