"""Makes a tiny random Llama as a Hugging Face directory, for tests of mechanics over the real engine."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 3, 64, 4, 2, 16, 128
CONTEXT_TOKENS = 4096
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = len(SPECIALS) + 256

LOGIT_SCALE = 8.0
"""Standard deviation of the logits. The best two lie about 2 apart, a hundred thousand times float32's rounding."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(folder: Path, *, seed: int = 0, shards: int = 1, context_tokens: int = CONTEXT_TOKENS) -> Path:
    """Write the model into `folder` and return it; equal arguments give equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(seed)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        _save_sharded(weights, folder, shards)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", tiny_config(context_tokens))
    _write(
        folder / "tokenizer_config.json",
        {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "chat_template": CHAT_TEMPLATE},
    )
    return folder


def tiny_config(context_tokens: int = CONTEXT_TOKENS) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def tiny_weights(seed: int) -> dict[str, torch.Tensor]:
    """Random weights that keep the spread of activations, so that attention and every layer count."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * spread / columns**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN, HIDDEN**0.5)}
    for index in range(LAYERS):
        prefix = f"model.layers.{index}"
        weights |= {
            f"{prefix}.input_layernorm.weight": norm(),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, 2.0),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2.0),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": norm(),
            f"{prefix}.mlp.gate_proj.weight": matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, FEED_FORWARD),
        }
    return weights | {"model.norm.weight": norm(), "lm_head.weight": matrix(VOCAB_SIZE, HIDDEN, LOGIT_SCALE)}


def tiny_tokenizer() -> Tokenizer:
    """One id a byte, after the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


def _save_sharded(weights: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1))
