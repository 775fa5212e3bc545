"""Tokenizer and template of a Hugging Face model directory."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvrelay.errors import InvalidArgument
from kvrelay.model.text import TextModel, fingerprint, require


def hf_text(folder: Path) -> TextModel:
    """Read tokenizer.json, the chat template and the special tokens.

    Raises:
        InvalidArgument: a file or a field that is needed is not there.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidArgument("model", f"{folder} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    config = _json(folder / "config.json")
    described = _json(folder / "tokenizer_config.json")
    template = _template(folder, described)
    eos_ids = _eos_ids(tokenizer, config, _json(folder / "generation_config.json"), described)
    require(config.get("max_position_embeddings"), "max_position_embeddings", folder / "config.json")
    return TextModel(
        tokenizer=tokenizer,
        chat_template=template,
        eos_ids=eos_ids,
        bos_token=_token_text(described.get("bos_token")),
        eos_token=_token_text(described.get("eos_token"))
        or "".join(tokenizer.id_to_token(i) or "" for i in eos_ids[:1]),
        context_tokens=config["max_position_embeddings"],
        vocab_size=config.get("vocab_size") or tokenizer.get_vocab_size(),
        fingerprint=fingerprint(tokenizer, template),
    )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _template(folder: Path, described: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = described.get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the plain chat
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _eos_ids(tokenizer: Tokenizer, *sources: dict[str, Any]) -> tuple[int, ...]:
    """Collect the end ids that any of the model's files names, in that order."""
    found: list[int] = []
    for source in sources:
        ids = source.get("eos_token_id")
        found += [ids] if isinstance(ids, int) else ids or []
        text = _token_text(source.get("eos_token"))
        known = tokenizer.token_to_id(text) if text else None
        found += [] if known is None else [known]
    return tuple(dict.fromkeys(found))


def _token_text(token: str | dict[str, str] | None) -> str:
    return token["content"] if isinstance(token, dict) else token or ""
