"""The Llama family: RMSNorm, rotary grouped-query attention, gated SiLU feed-forward."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from kvrelay.engine.attention import BatchAttention
from kvrelay.engine.loader import Checkpoint
from kvrelay.engine.loader.gguf_file import ROPE_DIVISORS
from kvrelay.engine.models.interface import KvShape
from kvrelay.engine.models.linear import Linear
from kvrelay.engine.models.rope import Rope, RotaryTable
from kvrelay.engine.models.weights import Weights
from kvrelay.errors import InvalidArgument

_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape and constants of a Llama model; sizes in numbers a token."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    tied_embeddings: bool
    rope: Rope

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Read a Hugging Face configuration.

        Raises:
            InvalidArgument: a field is missing, or asks for what is not supported; names it.
        """
        for name in _REQUIRED:
            if config.get(name) is None:
                raise InvalidArgument("model", f"its configuration has no {name}")
        if config.get("hidden_act", "silu") != "silu":
            raise InvalidArgument("model", f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
        heads: int = config["num_attention_heads"]
        head_dim: int = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            feed_forward=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            context_tokens=config["max_position_embeddings"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=Rope.of(config, head_dim),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer; `qkv` and `gate_up` are the joined projections, norms are float32."""

    attention_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A Llama model; see `Model`.

    Args:
        config: shape and constants.
        weights: where the weights are read from.
    """

    def __init__(self, config: LlamaConfig, weights: Weights) -> None:
        self.config = config
        self.kv_shape = KvShape(config.layers, config.kv_heads, config.head_dim)
        self.context_tokens = config.context_tokens
        self.vocab_size = config.vocab_size
        self.description = repr(config)
        self._embedding = weights.read("model.embed_tokens", config.vocab_size, config.hidden)
        self._layers = [_load_layer(config, weights, index) for index in range(config.layers)]
        self._norm = weights.read_norm("model.norm", config.hidden)
        tied, head = config.tied_embeddings, ("lm_head", config.vocab_size, config.hidden)
        self._head = Linear(self._embedding) if tied else weights.linear(head)
        self._rotary = RotaryTable(config.rope, config.head_dim, config.context_tokens, weights.device)

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> "Llama":
        """Load a checkpoint.

        Raises:
            InvalidArgument: the configuration is not supported, a tensor is missing or of another shape, or the
                checkpoint holds tensors that this model would silently leave out.
        """
        config = LlamaConfig.of(checkpoint.config)
        weights = Weights(checkpoint, dtype, device)
        if ROPE_DIVISORS in checkpoint.names:
            divisors = tuple(weights.stored(ROPE_DIVISORS).tolist())
            config = replace(config, rope=replace(config.rope, divisors=divisors))
        model = cls(config, weights)
        # A tied head may be stored all the same; it is the embedding.
        weights.check_all_used(ignore=frozenset({"lm_head.weight"} if config.tied_embeddings else ()))
        return model

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: BatchAttention, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a flat batch; see `Model.forward`."""
        cos, sin = self._rotary.at(positions)
        # The sum of all layers' outputs stays in float32: exact where it matters, and no dearer.
        x = functional.embedding(ids, self._embedding).float()
        for index, layer in enumerate(self._layers):
            x += self._attend(index, layer, self._normalised(x, layer.attention_norm), cos, sin, attention)
            x += _feed_forward(layer, self._normalised(x, layer.mlp_norm))
        return self._head(self._normalised(x[rows], self._norm)).float()

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467) of float32; returns the dtype of the weights."""
        scale = x.square().mean(-1, keepdim=True).add_(self.config.norm_eps).rsqrt_()
        return (x * scale).mul_(weight).to(self._embedding.dtype)

    def _attend(  # noqa: PLR0917 - one call site, once a layer
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: BatchAttention,
    ) -> torch.Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        qkv = layer.qkv(x).view(len(x), -1, self.config.head_dim)
        self._rotary.rotate_(qkv[:, : heads + kv_heads], cos, sin)
        attention.write_kv(index, qkv[:, heads:].view(len(x), 2, kv_heads, -1))
        attended = attention.forward(index, qkv[:, :heads])
        return layer.out(attended.flatten(1))


def _feed_forward(layer: _Layer, x: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(functional.silu(gate).mul_(up))


def _load_layer(config: LlamaConfig, weights: Weights, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, feed_forward = config.hidden, config.feed_forward
    return _Layer(
        attention_norm=weights.read_norm(f"{prefix}.input_layernorm", hidden),
        qkv=weights.linear(
            (f"{prefix}.self_attn.q_proj", queries, hidden),
            (f"{prefix}.self_attn.k_proj", keys, hidden),
            (f"{prefix}.self_attn.v_proj", keys, hidden),
        ),
        out=weights.linear((f"{prefix}.self_attn.o_proj", hidden, queries)),
        mlp_norm=weights.read_norm(f"{prefix}.post_attention_layernorm", hidden),
        gate_up=weights.linear(
            (f"{prefix}.mlp.gate_proj", feed_forward, hidden),
            (f"{prefix}.mlp.up_proj", feed_forward, hidden),
        ),
        down=weights.linear((f"{prefix}.mlp.down_proj", hidden, feed_forward)),
    )
