"""Model files and the text side of a model."""

import json

import pytest
from tokenizers import Tokenizer

from kvrelay.config import DEFAULT_MODEL
from kvrelay.errors import InvalidArgument
from kvrelay.model import gguf_cache
from kvrelay.model.files import resolve
from kvrelay.model.gguf_text import gguf_text
from kvrelay.model.text import load_text


@pytest.fixture(scope="module")
def bundled():
    return resolve(DEFAULT_MODEL)


def test_unknown_model_is_refused_with_what_may_be_given():
    with pytest.raises(InvalidArgument, match=r"'nonesuch' is none of smollm2-135m, mock, no .gguf file"):
        resolve("nonesuch")


def test_bundled_model_round_trips_text_and_special_tokens(bundled):
    text = load_text(bundled)
    source = "<|im_start|>user\nHello 12345 wörld 你好 🎉 it's\n\n   x<|im_end|>"
    ids = text.tokenizer.encode(source, add_special_tokens=False).ids
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == source
    assert text.eos_ids == (2,)
    assert ids[-1] == 2
    assert text.context_tokens == 8192


def test_digits_are_single_tokens_as_the_model_was_trained(bundled):
    text = load_text(bundled)
    assert text.tokenizer.encode("12345", add_special_tokens=False).tokens == list("12345")


def test_kept_text_equals_text_read_from_the_file(bundled, tmp_path, monkeypatch):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    fresh = gguf_cache.cached_gguf_text(bundled.path)
    kept = gguf_cache.cached_gguf_text(bundled.path)
    assert kept.fingerprint == fresh.fingerprint == gguf_text(bundled.path).fingerprint
    assert kept.tokenizer.to_str() == fresh.tokenizer.to_str()


def test_torn_cache_entry_is_a_miss(bundled, tmp_path, monkeypatch):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    fresh = gguf_cache.cached_gguf_text(bundled.path)
    (entry,) = (tmp_path / "text").glob("*.json")
    entry.write_text(entry.read_text()[:1000])
    assert gguf_cache.cached_gguf_text(bundled.path).fingerprint == fresh.fingerprint


def test_mock_model_spells_any_text_in_bytes():
    text = load_text(resolve("mock"))
    ids = text.tokenizer.encode("hé 🎉", add_special_tokens=False).ids
    assert len(ids) == len("hé 🎉".encode())
    assert text.tokenizer.decode(ids) == "hé 🎉"


@pytest.fixture
def folder(tmp_path):
    mock = load_text(resolve("mock"))
    mock.tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"max_position_embeddings": 64, "vocab_size": 512, "eos_token_id": [0, 7]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    return tmp_path


def test_hugging_face_folder_gives_template_and_all_end_ids(folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    text = load_text(resolve(str(folder)))
    assert text.eos_ids == (0, 7)
    assert text.chat_template == "{{ messages }}"
    assert text.context_tokens == 64


def test_fingerprint_changes_with_template_and_vocabulary(folder):
    plain = load_text(resolve(str(folder))).fingerprint
    (folder / "chat_template.jinja").write_text("x")
    templated = load_text(resolve(str(folder))).fingerprint
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len({plain, templated, load_text(resolve(str(folder))).fingerprint}) == 3


def test_folder_without_tokenizer_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"has no tokenizer.json"):
        load_text(resolve(str(tmp_path)))
