"""Block keys: 128-bit chained hashes that name a block's content and everything before it.

    root  = H(tag_root, model fingerprint, tokenizer fingerprint, block_tokens, adapter, salt)
    key_i = H(tag_block, key of block i-1 (the root before block 0), token ids of block i as little-endian u32)

H is SHA-256 cut to 128 bits over the fields, each with its length as little-endian u64 before it. The first field is
the domain's tag, so that no root can equal a block key. Lengths come first so that two different lists of fields never
give the same bytes. The format is frozen: `KEY_VERSION` rises when any of this changes.
"""

import hashlib
from collections.abc import Iterable
from typing import Final

from kvrelay.errors import InvalidArgument, Mismatch
from kvrelay.types import KEY_BYTES, KvLayout, ModelIdentity, pack_ids

TAG_ROOT: Final = b"kvrelay/root/v1"
TAG_BLOCK: Final = b"kvrelay/block/v1"

TOKEN_ID_BYTES: Final = 4

GOLDEN_BLOCKS: Final = 4
"""Blocks in the golden vector: enough to show that chaining agrees, small enough to travel with each registration."""

_GOLDEN_ID_STEP: Final = 0x9E3779B1
"""Odd, so that the golden ids, taken modulo 2^32, use all four bytes and never repeat in a block."""

# Neither the name clients ask for nor the minor version changes what a block holds.
_IDENTITY_FIELDS: Final = (
    "protocol_major",
    "key_version",
    "block_tokens",
    "model_fingerprint",
    "tokenizer_fingerprint",
    "context_tokens",
    "golden_keys",
)
_LAYOUT_FIELDS: Final = (
    "axes",
    "layers",
    "kv_heads",
    "head_dim",
    "dtype",
    "block_tokens",
    "page_tokens",
    "page_bytes",
)


def root_key(
    *,
    model_fingerprint: str,
    tokenizer_fingerprint: str,
    block_tokens: int,
    adapter: str = "",
    salt: str = "",
) -> bytes:
    """Return the 16-byte root of the key chains of one model, adapter and tenant.

    Raises:
        InvalidArgument: `block_tokens` is not positive.
    """
    _check_block_tokens(block_tokens)
    fields = (
        TAG_ROOT,
        model_fingerprint.encode(),
        tokenizer_fingerprint.encode(),
        block_tokens.to_bytes(4, "little"),
        adapter.encode(),
        salt.encode(),
    )
    return hashlib.sha256(b"".join(map(_framed, fields))).digest()[:KEY_BYTES]


def block_keys(root: bytes, packed_ids: bytes, block_tokens: int, *, parent: bytes | None = None) -> bytes:
    """Return the packed keys of the full blocks of a sequence, 16 bytes each; a tail that is not full has no key.

    Args:
        root: the chain's root, used when there is no parent.
        packed_ids: token ids as little-endian u32, beginning at a block boundary.
        block_tokens: tokens in a block, as in the root.
        parent: key of the block before `packed_ids`, to continue a chain.

    Raises:
        InvalidArgument: a length is wrong.
    """
    _check_block_tokens(block_tokens)
    if len(packed_ids) % TOKEN_ID_BYTES:
        raise InvalidArgument("ids", f"{len(packed_ids)} bytes is not a whole number of 4-byte token ids")
    key = root if parent is None else parent
    if len(key) != KEY_BYTES:
        raise InvalidArgument("root_key" if parent is None else "parent", f"{len(key)} bytes, expected {KEY_BYTES}")
    block_bytes = block_tokens * TOKEN_ID_BYTES
    # What does not change from block to block is framed once: this loop runs for every block of every request.
    before_key = _framed(TAG_BLOCK) + _length(KEY_BYTES)
    before_ids = _length(block_bytes)
    sha256 = hashlib.sha256
    keys = []
    for start in range(0, len(packed_ids) - block_bytes + 1, block_bytes):
        key = sha256(before_key + key + before_ids + packed_ids[start : start + block_bytes]).digest()[:KEY_BYTES]
        keys.append(key)
    return b"".join(keys)


def golden_keys(*, model_fingerprint: str, tokenizer_fingerprint: str, block_tokens: int) -> bytes:
    """Return the keys of a fixed token sequence: two processes with the same ones compute the same keys."""
    root = root_key(
        model_fingerprint=model_fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint,
        block_tokens=block_tokens,
    )
    ids = [(i * _GOLDEN_ID_STEP) % 2**32 for i in range(1, GOLDEN_BLOCKS * block_tokens + 1)]
    return block_keys(root, pack_ids(ids), block_tokens)


def xor_keys(keys: Iterable[bytes], start: bytes = bytes(KEY_BYTES)) -> bytes:
    """Return the exclusive or of keys and `start`: a checksum of a set that adding and removing update alike."""
    total = int.from_bytes(start, "little")
    for key in keys:
        total ^= int.from_bytes(key, "little")
    return total.to_bytes(KEY_BYTES, "little")


def make_identity(
    *,
    model: str,
    model_fingerprint: str,
    tokenizer_fingerprint: str,
    block_tokens: int,
    context_tokens: int,
) -> ModelIdentity:
    """Return the identity of a model as this process computes it, golden vector included."""
    return ModelIdentity(
        model=model,
        model_fingerprint=model_fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint,
        block_tokens=block_tokens,
        context_tokens=context_tokens,
        golden_keys=golden_keys(
            model_fingerprint=model_fingerprint,
            tokenizer_fingerprint=tokenizer_fingerprint,
            block_tokens=block_tokens,
        ),
    )


def check_identity(expected: ModelIdentity, got: ModelIdentity) -> None:
    """Check that two processes may share blocks.

    The golden vector of `got` is compared with what this process computes from the other fields, so that a process
    that hashes otherwise is found even when both told the same vector.

    Raises:
        Mismatch: names the first field that differs.
    """
    _check_fields(_IDENTITY_FIELDS, expected, got)
    computed = golden_keys(
        model_fingerprint=got.model_fingerprint,
        tokenizer_fingerprint=got.tokenizer_fingerprint,
        block_tokens=got.block_tokens,
    )
    if got.golden_keys != computed:
        raise Mismatch("golden_keys", computed.hex(), got.golden_keys.hex())


def check_layout(expected: KvLayout, got: KvLayout) -> None:
    """Check that pages of two pools have the same shape.

    Raises:
        Mismatch: names the first field that differs.
    """
    _check_fields(_LAYOUT_FIELDS, expected, got)


def _check_fields(names: tuple[str, ...], expected: object, got: object) -> None:
    for name in names:
        want, have = getattr(expected, name), getattr(got, name)
        if want != have:
            raise Mismatch(name, _shown(want), _shown(have))


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _check_block_tokens(block_tokens: int) -> None:
    if not 0 < block_tokens < 2**32:
        raise InvalidArgument("block_tokens", f"{block_tokens} is not in [1, 2^32)")


def _length(size: int) -> bytes:
    return size.to_bytes(8, "little")


def _framed(field: bytes) -> bytes:
    return _length(len(field)) + field
