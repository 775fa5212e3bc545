"""A GGUF file as a checkpoint (key and tensor names: docs/gguf.md in ggml-org/ggml)."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize, quant_shape_to_byte_shape

from kvrelay.engine.loader.checkpoint import digest_files
from kvrelay.engine.loader.gguf_header import Header, TensorPlace, read_header
from kvrelay.errors import InvalidArgument

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, in files of models with scaled RoPE; has no Hugging Face name."""

_CONFIG_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}
_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint:
    """Weights of a GGUF file, mapped into memory and dequantised one tensor at a time.

    Raises:
        InvalidArgument: the file is damaged or of a version that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = np.memmap(path, mode="r", dtype=np.uint8)
        try:
            header = read_header(self._data.data)
        except (ValueError, OverflowError) as error:
            raise InvalidArgument("model", f"{path}: {error}") from error
        kind = header.fields.get("general.architecture", "")
        self.architecture = ARCHITECTURES.get(kind, kind)
        self._places = {_hugging_face_name(name): place for name, place in header.tensors.items()}
        self.names = frozenset(self._places)
        self.config = _config(header, kind, tied="lm_head.weight" not in self.names)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor as float32; see `Checkpoint.tensor`."""
        place = self._places.get(name)
        if place is None:
            raise InvalidArgument("model", f"{self._path} has no tensor {name}")
        values = torch.from_numpy(self._dequantised(name, place)).view(place.shape)
        return _halves_first(values, self._rotary_heads(name))

    def digest(self) -> str:
        """Return the SHA-256 of the file; metadata counts too."""
        return digest_files([self._path])

    def _dequantised(self, name: str, place: TensorPlace) -> "np.ndarray[Any, np.dtype[np.float32]]":
        shape = quant_shape_to_byte_shape(place.shape, place.kind)
        count = int(np.prod(shape))
        stored = self._data[place.offset : place.offset + count]
        if len(stored) < count:
            raise InvalidArgument("model", f"{self._path} ends inside tensor {name}: it is not complete")
        try:
            # A copy where nothing had to be dequantised: torch wants writable memory.
            return np.require(dequantize(stored.reshape(shape), place.kind), requirements="W")
        except NotImplementedError as error:
            raise InvalidArgument(
                "model", f"{name} is quantised as {place.kind.name}, which is not supported"
            ) from error

    def _rotary_heads(self, name: str) -> int:
        """Return the number of heads whose rotary pairs must be put apart; 0: the tensor has none."""
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else 0


def _halves_first(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head from rotary pairs side by side, as GGUF has them, to first halves, then second."""
    if not heads:
        return weights
    rows, columns = weights.shape
    pairs = weights.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _hugging_face_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_TENSOR_NAMES[stem]}.{suffix}" if stem in _TENSOR_NAMES else name


def _config(header: Header, kind: str, *, tied: bool) -> dict[str, Any]:
    fields = header.fields
    given = {ours: fields.get(f"{kind}.{theirs}") for ours, theirs in _CONFIG_KEYS.items()}
    config = {name: value for name, value in given.items() if value is not None}
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_parameters"] = {"rope_type": scaling}
    if "token_embd.weight" in header.tensors:
        config.setdefault("vocab_size", header.tensors["token_embd.weight"].shape[0])
    return config | {"tie_word_embeddings": tied, "hidden_act": "silu"}
