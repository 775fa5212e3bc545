"""What `transformers` answers: the oracle of parity tests, in float32 on one thread's worth of torch."""

import functools
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvrelay.config import DEFAULT_MODEL
from kvrelay.model.files import cache_folder, resolve


def reference_tokens(
    prompt_ids: list[int], n: int, *, model: Path | None = None, eos_id: int | None = None
) -> list[int]:
    """Return the `n` tokens that greedy decoding writes after a prompt.

    Args:
        prompt_ids: the prompt.
        n: tokens wanted.
        model: a Hugging Face directory; None: the bundled model.
        eos_id: ends the answer early, and is its last token; None: end ids are ordinary tokens.
    """
    return list(_written(tuple(prompt_ids), n, model, eos_id))


@functools.lru_cache(maxsize=256)  # many tests ask for the same answers, at seconds each
def _written(prompt_ids: tuple[int, ...], n: int, model: Path | None, eos_id: int | None) -> tuple[int, ...]:
    how = GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=eos_id, pad_token_id=0)
    prompt = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = load_reference(model).generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
    return tuple(out[0, len(prompt_ids) :].tolist())


def reference_logprobs(ids: list[int], *, model: Path | None = None) -> torch.Tensor:
    """Return (tokens, vocabulary) log-probabilities: row i is of what follows ids[: i + 1]."""
    with torch.inference_mode():
        return load_reference(model)(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


@functools.lru_cache(maxsize=2)
def load_reference(model: Path | None = None) -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(model or bundled_as_hugging_face(), dtype=torch.float32).eval()
    loaded.generation_config = GenerationConfig()  # or its end ids would fill in where a caller asks for none
    return loaded


def bundled_as_hugging_face() -> Path:
    """Return the bundled model as a directory that `transformers` converted; kept in the cache folder."""
    source = resolve(DEFAULT_MODEL).path
    target = cache_folder() / "reference" / source.stem
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        converted = _convert(source)
        with tempfile.TemporaryDirectory(dir=target.parent) as staged:
            converted.save_pretrained(Path(staged) / "model")
            if not target.is_dir():
                (Path(staged) / "model").rename(target)
    return target


def _convert(gguf: Path) -> LlamaForCausalLM:
    """Do what `from_pretrained(gguf_file=)` does, which would ask for one more package (accelerate)."""
    config = load_gguf_checkpoint(gguf, return_tensors=False)["config"]
    model = LlamaForCausalLM(LlamaConfig(**config))
    tensors = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert not left.unexpected_keys
    assert left.missing_keys == ["lm_head.weight"]
    assert config["tie_word_embeddings"]
    return model
