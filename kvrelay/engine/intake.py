"""Checks what comes in and turns it into sequences: nothing behind this file meets bad input."""

from dataclasses import dataclass, replace
from zlib import crc32

from kvrelay.engine.protocol import Prompt
from kvrelay.engine.sequence import Limits, Sequence
from kvrelay.errors import InvalidArgument
from kvrelay.types import KEY_BYTES, KvLayout, Sampling, TokenArray, split_keys, unpack_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model and its pool can take.

    Attributes:
        context_tokens: longest sequence, by the model and by the pool's size.
        vocab_size: token ids are below it.
        eos_ids: the model's own end-of-sequence ids.
        layout: shape of the pool.
    """

    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    layout: KvLayout


def read_sequence(prompt: Prompt, facts: ModelFacts) -> Sequence:
    """Return the sequence of a prompt and the output so far.

    Raises:
        InvalidArgument: names the field and the limit.
    """
    ids = unpack_ids(prompt.prompt_ids, name="prompt_ids")
    prompt_tokens = len(ids)
    if not prompt_tokens:
        raise InvalidArgument("prompt_ids", "empty; at least 1 token is needed")
    if prompt_tokens >= facts.context_tokens:
        raise InvalidArgument("prompt_ids", f"{prompt_tokens} tokens; at most {facts.context_tokens - 1} are taken")
    _check_ids("prompt_ids", ids, facts)
    output = unpack_ids(prompt.output_ids, name="output_ids")
    _check_ids("output_ids", output, facts)
    ids.extend(output)
    if len(ids) > facts.context_tokens:
        raise InvalidArgument("output_ids", f"{len(ids)} tokens with the prompt; at most {facts.context_tokens}")
    return Sequence(ids=ids, prompt_tokens=prompt_tokens, root_key=_root_key(prompt), keys=_keys(prompt, ids, facts))


def read_sampling(sampling: Sampling, job_id: str) -> Sampling:
    """Return the sampling with its seed set; without one, it is drawn from the job's id.

    Raises:
        InvalidArgument: a field is out of range.
    """
    sampling.validate()
    return sampling if sampling.seed is not None else replace(sampling, seed=crc32(job_id.encode()))


def read_limits(sampling: Sampling, facts: ModelFacts) -> Limits:
    """Return when an answer ends."""
    own = () if sampling.ignore_eos else facts.eos_ids
    return Limits(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        context_tokens=facts.context_tokens,
        stop_ids=frozenset((*sampling.stop_ids, *own)),
    )


def check_token(name: str, token: int | None, facts: ModelFacts) -> None:
    """Check a single token id.

    Raises:
        InvalidArgument: it is not in the vocabulary.
    """
    if token is not None and not 0 <= token < facts.vocab_size:
        raise InvalidArgument(name, f"token id {token} is not in [0, {facts.vocab_size})")


def check_held(held_tokens: int, sequence: Sequence, facts: ModelFacts) -> None:
    """Check how much of a prompt the puller has already.

    Raises:
        InvalidArgument: it is no whole number of pages, or leaves nothing to compute.
    """
    page_tokens = facts.layout.page_tokens
    if held_tokens % page_tokens:
        raise InvalidArgument("held_tokens", f"{held_tokens} is not a multiple of {page_tokens}, the tokens in a page")
    if not 0 <= held_tokens < len(sequence.ids):
        raise InvalidArgument("held_tokens", f"{held_tokens} is not in [0, {len(sequence.ids)})")


def _check_ids(name: str, ids: TokenArray, facts: ModelFacts) -> None:
    if ids:
        check_token(name, max(ids), facts)


def _root_key(prompt: Prompt) -> bytes:
    if len(prompt.root_key) != KEY_BYTES:
        raise InvalidArgument("root_key", f"{len(prompt.root_key)} bytes; {KEY_BYTES} are needed")
    return prompt.root_key


def _keys(prompt: Prompt, ids: TokenArray, facts: ModelFacts) -> list[bytes]:
    keys = split_keys(prompt.block_keys, name="block_keys")
    blocks = len(ids) // facts.layout.block_tokens
    if len(keys) != blocks:
        raise InvalidArgument(
            "block_keys", f"{len(keys)} keys; {len(ids)} tokens in blocks of {facts.layout.block_tokens} have {blocks}"
        )
    return keys
