"""Loading, refusing, memory and identity of the torch runner, on a tiny model."""

import array
import ctypes
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from support.reference import reference_tokens
from support.run_engine import Pages, write
from support.tiny import (
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    make_tiny,
    tiny_config,
    tiny_weights,
)

from kvrelay.config import EngineConfig
from kvrelay.engine.loader import open_checkpoint
from kvrelay.engine.models.linear import Linear
from kvrelay.engine.models.llama import LlamaConfig
from kvrelay.engine.runner import Draw, Slice
from kvrelay.engine.torch_runner import TorchRunner
from kvrelay.errors import FailedPrecondition, InternalError, InvalidArgument
from kvrelay.model.files import resolve
from kvrelay.types import Sampling

POOL_PAGES = 24
PAGE_TOKENS = 32
PROMPT = list(range(5, 75))


def make_runner(model: Path, **fields) -> TorchRunner:
    runner = TorchRunner(EngineConfig(**{"model": str(model), "dtype": "float32", "threads": 1} | fields))
    runner.allocate(POOL_PAGES)
    return runner


def answer(runner: TorchRunner, tokens: int = 24) -> list[int]:
    return write(runner, [Pages(POOL_PAGES, runner.layout.page_tokens).sequence(PROMPT, tokens)], tokens)[0]


def edit_config(model: Path, **fields) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(model: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
    edit(weights)
    save_file(weights, model / "model.safetensors")


@pytest.fixture
def tiny(tmp_path) -> Path:
    return make_tiny(tmp_path / "tiny")


def test_a_sharded_directory_answers_as_a_single_file_does(tiny, tmp_path):
    sharded = make_tiny(tmp_path / "sharded", shards=3)
    assert answer(make_runner(sharded)) == answer(make_runner(tiny))


def test_a_gguf_file_holds_what_it_was_made_from(tmp_path):
    weights = tiny_weights(0)
    checkpoint = open_checkpoint(resolve(str(write_gguf(tmp_path / "tiny.gguf", weights))))
    assert checkpoint.names == set(weights)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in weights.items())
    got, expected = LlamaConfig.of(checkpoint.config), LlamaConfig.of(tiny_config())
    assert got.norm_eps == pytest.approx(expected.norm_eps)
    assert dataclasses.replace(got, norm_eps=expected.norm_eps) == expected


def write_gguf(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for name, tensor in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        stored = side_by_side(tensor, heads) if heads else tensor
        writer.add_tensor(gguf_name(name), stored.numpy(), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def side_by_side(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF's order of the rows of a head: 0, half, 1, half + 1, ..."""
    half = HEAD_DIM // 2
    order = [head * HEAD_DIM + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return weights[order].contiguous()


def gguf_name(name: str) -> str:
    renames = {
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    for old, new in renames.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("keep", [2, 100, 9000, 300_000])
def test_a_gguf_file_that_ends_early_is_refused(tmp_path, keep: int):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_weights(0))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidArgument, match=r"GGUF|ends"):
        open_checkpoint(resolve(str(path))).tensor("lm_head.weight")


@pytest.mark.parametrize("page_tokens", [32, 64, 96])
def test_the_answer_does_not_depend_on_the_page_size(tiny, page_tokens: int):
    assert answer(make_runner(tiny, page_tokens=page_tokens)) == reference_tokens(PROMPT, 24, model=tiny)


def test_llama3_rope_scaling_answers_as_the_reference(tiny):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    plain = answer(make_runner(tiny))
    edit_config(tiny, rope_scaling=scaling)
    scaled = answer(make_runner(tiny))
    assert scaled == reference_tokens(PROMPT, 24, model=tiny)
    assert scaled != plain


def test_tied_embeddings_answer_as_the_reference(tiny):
    def tie(weights: dict[str, torch.Tensor]) -> None:
        del weights["lm_head.weight"]

    edit_weights(tiny, tie)
    edit_config(tiny, tie_word_embeddings=True)
    assert answer(make_runner(tiny)) == reference_tokens(PROMPT, 24, model=tiny)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"intermediate_size": 64}, "gate_proj"),
        ({"num_hidden_layers": 2}, r"model\.layers\.2"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_model_that_is_not_supported_is_refused_and_the_reason_named(tiny, fields: dict, named: str):
    edit_config(tiny, **fields)
    with pytest.raises(InvalidArgument, match=named):
        make_runner(tiny)


def test_biases_are_refused_rather_than_left_out(tiny):
    def add_bias(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(HEADS * HEAD_DIM)

    edit_weights(tiny, add_bias)
    with pytest.raises(InvalidArgument, match=r"q_proj\.bias"):
        make_runner(tiny)


def test_missing_weights_are_refused(tiny):
    (tiny / "model.safetensors").unlink()
    with pytest.raises(InvalidArgument, match=r"model\.safetensors is missing"):
        make_runner(tiny)


def test_damaged_weights_are_refused(tiny):
    (tiny / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(InvalidArgument, match="damaged"):
        make_runner(tiny)


def test_flash_attn_is_refused_until_it_is_there(tiny):
    with pytest.raises(FailedPrecondition, match="flash_attn"):
        make_runner(tiny, attention="flash_attn")


def test_an_unknown_device_is_refused(tiny):
    with pytest.raises(InvalidArgument, match="device"):
        make_runner(tiny, device="abacus")


def test_the_pool_is_aligned_and_laid_out_as_told(tiny):
    runner = TorchRunner(EngineConfig(model=str(tiny), dtype="float32", threads=1))
    memory = runner.allocate(POOL_PAGES)
    layout = runner.layout
    assert memory.base_address % 4096 == 0
    assert memory.pages == POOL_PAGES
    assert memory.page_bytes == layout.page_bytes == LAYERS * 2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM * 4
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (LAYERS, KV_HEADS, HEAD_DIM, "float32")
    # Nothing but page 5 changes when one token is written there, at the place that the axes name.
    part = Slice(array.array("I", [7]), 0, 1, array.array("I", [5]), Draw(Sampling(), 1))
    runner.run([part])
    raw = ctypes.string_at(memory.base_address, memory.pages * memory.page_bytes)
    pool = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    pool = pool.view(POOL_PAGES, LAYERS, 2, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
    assert bool((pool[5, :, :, :, 0] != 0).all())
    pool[5, :, :, :, 0] = 0
    assert not pool.any()


def test_a_page_begun_shows_nothing_of_its_last_owner(tiny):
    runner = make_runner(tiny)
    expected = answer(runner)
    assert runner._kv is not None
    runner._kv.view.fill_(math.nan)
    assert answer(runner) == expected


def test_sequences_are_padded_without_reading_each_others_pages(tiny):
    runner = make_runner(tiny)
    expected = answer(runner)
    assert runner._kv is not None
    runner._kv.view[0].fill_(math.nan)
    pages = Pages(POOL_PAGES, PAGE_TOKENS)
    pages.sequence([1], 1)  # takes page 0
    longer = pages.sequence([*PROMPT, *PROMPT], 24)
    assert write(runner, [longer, pages.sequence(PROMPT, 24)], 24)[1] == expected


def test_broken_weights_fail_the_batch(tiny):
    edit_weights(tiny, lambda weights: weights["model.norm.weight"].fill_(math.nan))
    runner = make_runner(tiny)
    with pytest.raises(InternalError, match="not finite"):
        answer(runner)


def test_a_batch_without_draws_returns_nothing_drawn(tiny):
    runner = make_runner(tiny)
    part = Slice(array.array("I", PROMPT), 0, 40, array.array("I", [3, 4, 5]))
    assert runner.run([part]) == [None]


def test_fingerprints_tell_weights_dtype_and_rope_apart(tiny, tmp_path):
    def fingerprint(model: Path, **fields) -> str:
        return make_runner(model, **fields).model_fingerprint

    same, other = make_tiny(tmp_path / "same"), make_tiny(tmp_path / "other", seed=1)
    turned = make_tiny(tmp_path / "turned")
    edit_config(turned, rope_theta=5000.0)
    base = fingerprint(tiny)
    assert fingerprint(same) == base
    assert fingerprint(tiny, page_tokens=64, threads=2) == base
    changed = [fingerprint(other), fingerprint(turned), fingerprint(tiny, dtype="bfloat16")]
    assert len({base, *changed}) == 4


def test_two_runners_live_in_one_process(tiny, tmp_path):
    first, second = make_runner(tiny), make_runner(make_tiny(tmp_path / "other", seed=1))
    alone = answer(first), answer(second)
    assert alone[0] != alone[1]
    first.close()
    assert answer(second) == alone[1]


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
def test_packed_weights_multiply_as_plain_ones(rows: int):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    exact = x.double() @ weight.double().T
    with torch.inference_mode():
        result = Linear(weight)(x)
    assert result.dtype is torch.bfloat16
    # One rounding to bfloat16's 8 bits, and the sum's own.
    assert torch.allclose(result.double(), exact, rtol=2**-7, atol=2**-5)


def test_a_tiny_model_is_the_same_each_time_it_is_made(tiny, tmp_path):
    again = make_tiny(tmp_path / "again")
    assert {p.name: p.read_bytes() for p in tiny.iterdir()} == {p.name: p.read_bytes() for p in again.iterdir()}
    assert dataclasses.asdict(make_runner(tiny).layout) == dataclasses.asdict(make_runner(again).layout)
