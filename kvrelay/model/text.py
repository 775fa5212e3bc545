"""The text side of a model: tokenizer, chat template, special tokens, and their fingerprint.

Routers need this and no weights, so it asks for the base install only.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from kvrelay.errors import InvalidArgument
from kvrelay.model.files import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Tokenizer and template of a model.

    Attributes:
        tokenizer: text to ids and back; adds no special tokens by itself.
        chat_template: Jinja source, or None when the model has none.
        eos_ids: ids that end an answer.
        bos_token: text of the beginning-of-sequence token, for templates; may be empty.
        eos_token: text of the first end-of-sequence token.
        context_tokens: longest sequence the model was made for.
        vocab_size: ids are below it.
        fingerprint: hex digest over vocabulary, merges, added tokens and chat template; does not depend on the version
            of the tokenizers library.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_token: str
    eos_token: str
    context_tokens: int
    vocab_size: int
    fingerprint: str = field(default="")


def load_text(files: ModelFiles) -> TextModel:
    """Load the text side of a model.

    Raises:
        InvalidArgument: the model has no tokenizer, or one of a kind that is not supported; names it.
    """
    if files.kind == "mock":
        from kvrelay.model.mock_text import mock_text  # noqa: PLC0415 - each kind loads only what it needs

        return mock_text()
    if files.kind == "gguf":
        from kvrelay.model.gguf_cache import cached_gguf_text  # noqa: PLC0415

        return cached_gguf_text(files.path)
    from kvrelay.model.hf_text import hf_text  # noqa: PLC0415

    return hf_text(files.path)


def fingerprint(tokenizer: Tokenizer, chat_template: str | None) -> str:
    """Return the digest described at `TextModel.fingerprint`."""
    described = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = sorted((token["id"], token["content"], token["special"]) for token in described["added_tokens"])
    parts = [
        json.dumps(sorted(vocab.items(), key=lambda item: item[1])),
        json.dumps([_merge(merge) for merge in described["model"].get("merges", [])]),
        json.dumps(added),
        chat_template or "",
    ]
    return _digest(parts)


def _merge(merge: str | list[str]) -> list[str]:
    # Older versions of the library write "a b", newer ones ["a", "b"].
    return merge.split(" ") if isinstance(merge, str) else merge


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def require(value: object, name: str, source: object) -> None:
    """Refuse a model file that lacks something.

    Raises:
        InvalidArgument: `value` is None.
    """
    if value is None:
        raise InvalidArgument("model", f"{source} has no {name}")
