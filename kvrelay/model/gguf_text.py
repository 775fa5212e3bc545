"""Tokenizer and template of a GGUF file (key names from the GGUF specification in ggml-org/ggml, docs/gguf.md)."""

from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvrelay.errors import InvalidArgument
from kvrelay.model.text import TextModel, fingerprint, require

CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4

# How the families split text before merging; published in their tokenizer.json files.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def gguf_text(path: Path) -> TextModel:
    """Read the tokenizer out of a GGUF file's metadata.

    Raises:
        InvalidArgument: the file has no tokenizer, or one of a kind that is not supported.
    """
    fields = _fields(path)
    template = fields.get("tokenizer.chat_template")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    tokenizer = _tokenizer(fields, tokens, path)
    eos_id: int = fields["tokenizer.ggml.eos_token_id"]
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    eos_ids = [eos_id, fields.get("tokenizer.ggml.eot_token_id"), fields.get("tokenizer.ggml.eom_token_id")]
    return TextModel(
        tokenizer=tokenizer,
        chat_template=template,
        eos_ids=tuple(dict.fromkeys(token for token in eos_ids if token is not None)),
        bos_token="" if bos_id is None else tokens[bos_id],
        eos_token=tokens[eos_id],
        context_tokens=fields[f"{fields['general.architecture']}.context_length"],
        vocab_size=len(tokens),
        fingerprint=fingerprint(tokenizer, template),
    )


def _fields(path: Path) -> dict[str, Any]:
    fields = {name: value.contents() for name, value in GGUFReader(path).fields.items()}
    for needed in (
        "general.architecture",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.eos_token_id",
    ):
        require(fields.get(needed), needed, path)
    return fields


def _tokenizer(fields: dict[str, Any], tokens: list[str], path: Path) -> Tokenizer:
    kind = fields["tokenizer.ggml.model"]
    if kind != "gpt2":
        raise InvalidArgument("model", f"{path} has a tokenizer of kind {kind!r}; supported in GGUF files: 'gpt2'")
    require(fields.get("tokenizer.ggml.merges"), "tokenizer.ggml.merges", path)
    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, path)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True) for i in _of_type(types, CONTROL_TOKEN)])
    tokenizer.add_tokens([AddedToken(tokens[i]) for i in _of_type(types, USER_DEFINED_TOKEN)])
    return tokenizer


def _of_type(types: list[int], wanted: int) -> list[int]:
    return [index for index, kind in enumerate(types) if kind == wanted]


def _pre_tokenizer(name: str, path: Path) -> pre_tokenizers.PreTokenizer:
    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return gpt2
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name == "llama-bpe":
        return split(_LLAMA3_SPLIT)
    if name == "qwen2":
        return split(_QWEN2_SPLIT)
    raise InvalidArgument("model", f"{path} splits text by {name!r}; supported: gpt-2, smollm, llama-bpe, qwen2")
