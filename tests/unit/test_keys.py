"""Block keys: the frozen format, chaining, and what must not collide."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument, Mismatch
from kvrelay.kv.keys import (
    block_keys,
    check_identity,
    check_layout,
    golden_keys,
    make_identity,
    root_key,
    xor_keys,
)
from kvrelay.types import KEY_BYTES, KvLayout, pack_ids, split_keys

IDENTITY = {"model_fingerprint": "00ff", "tokenizer_fingerprint": "abcd"}

LAYOUT = KvLayout(
    layers=2, kv_heads=3, head_dim=64, dtype="bfloat16", page_tokens=32, block_tokens=32, page_bytes=49152
)

ids = st.lists(st.integers(0, 2**32 - 1), max_size=80)
texts = st.text(st.characters(codec="utf-8"), max_size=6)


def make(**changes):
    return make_identity(**({"model": "a", **IDENTITY, "block_tokens": 32, "context_tokens": 8192} | changes))


# ---------------------------------------------------------------- the frozen format


def test_the_format_has_not_changed():
    """These literals are the format, version 1. If they must change, KEY_VERSION and the tags must rise with them."""
    root = root_key(**IDENTITY, block_tokens=4, adapter="lora", salt="tenant")
    assert root.hex() == "0bb27bab7dd5489e95bf0f3ec41caf10"
    keys = block_keys(root, pack_ids([0, 1, 2, 3, 2**32 - 1, 65536, 256, 7, 9]), 4)
    assert [key.hex() for key in split_keys(keys)] == [
        "332426dbc0bbacb9bc5efeaed3c17366",
        "1a7d48e625fdac610ee86ca7c3560ee5",
    ]
    assert golden_keys(**IDENTITY, block_tokens=32).hex() == (
        "db6db0083a4944e0e8dcffdf2929eef6acd4a40ab4f8d9035ed355f5140200ad"
        "40e560f77d1668080a59b850e05d58e72f6827485b8e6fe50a1b518d9052d0bf"
    )


# ---------------------------------------------------------------- chaining


@given(ids=ids, block_tokens=st.integers(1, 9), cut=st.integers(0, 80))
def test_extending_a_chain_equals_hashing_the_whole(ids, block_tokens, cut):
    root = root_key(**IDENTITY, block_tokens=block_tokens)
    whole = block_keys(root, pack_ids(ids), block_tokens)
    blocks = min(cut, len(ids)) // block_tokens
    head = block_keys(root, pack_ids(ids[: blocks * block_tokens]), block_tokens)
    parent = head[-KEY_BYTES:] or None
    tail = block_keys(root, pack_ids(ids[blocks * block_tokens :]), block_tokens, parent=parent)
    assert head + tail == whole
    assert len(whole) == len(ids) // block_tokens * KEY_BYTES


@given(
    ids=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=32), at=st.integers(0, 31), other=st.integers(1, 99)
)
def test_a_changed_token_changes_its_block_and_all_after_it_and_none_before(ids, at, other):
    at %= len(ids)
    changed = [*ids[:at], (ids[at] + other) % 2**32, *ids[at + 1 :]]
    root = root_key(**IDENTITY, block_tokens=4)
    before, after = (split_keys(block_keys(root, pack_ids(each), 4)) for each in (ids, changed))
    same = [old == new for old, new in zip(before, after, strict=True)]
    assert same == [block < at // 4 for block in range(len(before))]


def test_only_full_blocks_have_keys():
    root = root_key(**IDENTITY, block_tokens=32)
    for tokens, blocks in ((0, 0), (31, 0), (32, 1), (33, 1), (64, 2)):
        assert len(block_keys(root, pack_ids([1] * tokens), 32)) == blocks * KEY_BYTES


# ---------------------------------------------------------------- collisions


@given(
    roots=st.lists(
        st.tuples(texts, texts, st.integers(1, 2**32 - 1), texts, texts), unique=True, min_size=2, max_size=4
    )
)
def test_roots_of_different_fields_differ(roots):
    keys = [
        root_key(model_fingerprint=model, tokenizer_fingerprint=tokenizer, block_tokens=tokens, adapter=lora, salt=salt)
        for model, tokenizer, tokens, lora, salt in roots
    ]
    assert len(set(keys)) == len(keys)


@given(text=st.text("ab", max_size=6), data=st.data())
def test_a_text_split_differently_over_the_fields_gives_another_root(text, data):
    cuts = st.lists(st.integers(0, len(text)), min_size=3, max_size=3).map(sorted)
    splits = data.draw(st.lists(cuts, min_size=2, max_size=2, unique_by=tuple))
    roots = set()
    for cut in splits:
        model, tokenizer, adapter, salt = (text[a:b] for a, b in itertools.pairwise([0, *cut, len(text)]))
        roots.add(
            root_key(
                model_fingerprint=model, tokenizer_fingerprint=tokenizer, block_tokens=32, adapter=adapter, salt=salt
            )
        )
    assert len(roots) == 2


@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6))
def test_the_same_ids_in_blocks_of_another_size_have_other_keys_even_under_one_root(ids):
    root = root_key(**IDENTITY, block_tokens=len(ids))
    one = split_keys(block_keys(root, pack_ids(ids), len(ids)))
    longer = split_keys(block_keys(root, pack_ids([*ids, 0]), len(ids) + 1))
    assert not set(one) & set(longer)


def test_a_root_is_no_block_key_of_the_same_bytes():
    """A root's fields may be chosen by a tenant; the tag keeps them from spelling a block."""
    root = root_key(model_fingerprint="", tokenizer_fingerprint="", block_tokens=1)
    forged = root_key(model_fingerprint=root.decode("latin-1"), tokenizer_fingerprint="\0\0\0\0", block_tokens=1)
    assert forged not in split_keys(block_keys(root, pack_ids([0]), 1))


# ---------------------------------------------------------------- sets


@given(keys=st.lists(st.binary(min_size=16, max_size=16), max_size=12), data=st.data())
def test_the_xor_of_a_set_is_updated_by_adding_and_removing(keys, data):
    total = xor_keys(keys)
    assert xor_keys(data.draw(st.permutations(keys))) == total
    assert xor_keys(keys, start=total) == bytes(KEY_BYTES)
    half = len(keys) // 2
    assert xor_keys(keys[half:], start=xor_keys(keys[:half])) == total


# ---------------------------------------------------------------- checks


def test_equal_identities_agree_whatever_they_are_called():
    check_identity(make(), make())
    check_identity(make(), make(model="another name"))
    check_identity(make(), dataclasses.replace(make(), protocol_minor=9))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_major", 2),
        ("key_version", 2),
        ("block_tokens", 16),
        ("model_fingerprint", "11"),
        ("tokenizer_fingerprint", "22"),
        ("context_tokens", 4096),
        ("golden_keys", bytes(64)),
    ],
)
def test_an_identity_that_differs_is_refused_by_the_field(field, value):
    with pytest.raises(Mismatch) as raised:
        check_identity(make(), dataclasses.replace(make(), **{field: value}))
    assert raised.value.field == field


def test_a_process_that_hashes_otherwise_is_found_though_both_told_the_same():
    wrong = dataclasses.replace(make(), golden_keys=bytes(64))
    with pytest.raises(Mismatch) as raised:
        check_identity(wrong, wrong)
    assert raised.value.field == "golden_keys"


def test_equal_layouts_agree():
    check_layout(LAYOUT, dataclasses.replace(LAYOUT))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KvLayout)])
def test_a_layout_that_differs_is_refused_by_the_field(field):
    value = getattr(LAYOUT, field)
    other = f"{value}?" if isinstance(value, str) else value + 1
    with pytest.raises(Mismatch) as raised:
        check_layout(LAYOUT, dataclasses.replace(LAYOUT, **{field: other}))
    assert raised.value.field == field


def test_wrong_lengths_are_refused_by_name():
    root = root_key(**IDENTITY, block_tokens=32)
    for arguments, field in (
        ((root, b"123", 32), "ids"),
        ((b"short", b"", 32), "root_key"),
        ((root, b"", 0), "block_tokens"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            block_keys(*arguments)
        assert raised.value.field == field
    with pytest.raises(InvalidArgument, match="parent"):
        block_keys(root, b"", 32, parent=b"short")
