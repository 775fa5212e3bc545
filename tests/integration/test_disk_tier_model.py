"""The disk tier under a real model in fp32: what is loaded answers as what is computed."""

import dataclasses

import pytest
from support.tiny import make_tiny

from bench.tier_engine import TierEngine
from kvrelay.config import EngineConfig
from kvrelay.kv.tiers.disk import SUFFIX

PROMPT = list(range(5, 205))
PAGE_TOKENS = 32
PAGES = (len(PROMPT) - 1) // PAGE_TOKENS
TOKENS = 24


@pytest.fixture
def config(tmp_path):
    model = make_tiny(tmp_path / "tiny", context_tokens=512)
    return EngineConfig(
        model=str(model), dtype="float32", threads=1, kv_mib=16, disk_tier_dir=str(tmp_path / "tier"), disk_tier_mib=16
    )


def ask(config, *, wait=False):
    with TierEngine(config) as engine:
        asked = engine.ask(PROMPT, max_tokens=TOKENS)
        if wait:
            engine.wait_written()
    return asked


def test_loaded_kv_answers_as_computed_kv(config):
    computed, loaded = ask(config, wait=True), ask(config)
    assert computed.usage.computed_tokens == len(PROMPT)
    assert loaded.loaded
    assert loaded.usage.cached_tokens == PAGES * PAGE_TOKENS
    assert loaded.usage.computed_tokens == len(PROMPT) - PAGES * PAGE_TOKENS
    assert loaded.ids == computed.ids


def test_a_flipped_byte_is_computed_again_and_answers_as_before(config, tmp_path):
    computed = ask(config, wait=True)
    for path in tmp_path.rglob(f"*{SUFFIX}"):
        data = bytearray(path.read_bytes())
        data[-1000] ^= 0x40
        path.write_bytes(data)
    again = ask(config)
    assert again.usage.computed_tokens == len(PROMPT)
    assert again.ids == computed.ids


def test_pages_of_another_dtype_are_not_used(config):
    ask(config, wait=True)
    other = dataclasses.replace(config, dtype="bfloat16")
    assert ask(other).usage.cached_tokens == 0
