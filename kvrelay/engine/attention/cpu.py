"""Attention on the CPU: torch's fused kernel over pages that are gathered layer by layer.

Two ways in, chosen by the slice's length. A chunk of a prompt is computed alone, in tiles of queries. Single tokens
are batched: sequences of similar length are padded to the longest of their group and computed in one call.

Queries that share a KV head (grouped-query attention) are laid along an axis of their own, so that keys and values are
read once for all of them and never repeated in memory. The kernel keeps scores and sums in float32 for any dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvrelay.engine.attention.interface import BatchTable

TILE_QUERIES = 256
"""Queries computed at once: bounds the mask, and what is computed above the diagonal, without losing speed."""

PADDING_PAGES_FREE = 8
"""Pages of padding that cost less than one more call of the kernel (about 20 us a layer)."""

PADDING_SHARE_MAX = 0.25
"""Beyond that, a sequence is padded by at most this share of the longest in its group."""


class CpuAttention:
    """The backend; takes any page size."""

    name = "cpu"
    page_multiple = 1

    def begin(self, pool: torch.Tensor, table: BatchTable) -> "CpuBatch":
        """Prepare a batch; see `AttentionBackend.begin`."""
        return CpuBatch(pool, table)


class CpuBatch:
    """One batch; see `BatchAttention`."""

    def __init__(self, pool: torch.Tensor, table: BatchTable) -> None:
        self._pool = pool
        self._table = table
        firsts = table.cu_seqlens_q.tolist()
        page_tokens = pool.shape[4]
        chunks = [i for i, length in enumerate(table.lengths) if length > 1]
        singles = [i for i, length in enumerate(table.lengths) if length == 1]
        pages = [-(-(table.starts[i] + 1) // page_tokens) for i in singles]
        groups = [[singles[member] for member in group] for group in group_by_size(pages)]
        self._chunks = [_Chunk.of(table, i, firsts[i], page_tokens) for i in chunks]
        self._groups = [_Group.of(table, group, [firsts[i] for i in group], page_tokens) for group in groups]

    def write_kv(self, layer: int, kv: torch.Tensor) -> None:
        """Write keys and values; see `BatchAttention.write_kv`."""
        by_token = self._pool[:, layer].permute(0, 3, 1, 2, 4)
        by_token[self._table.slot_pages, self._table.slot_offsets] = kv

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend; see `BatchAttention.forward`."""
        out = torch.empty_like(q)
        by_head = self._pool[:, layer].permute(1, 2, 0, 3, 4)
        for chunk in self._chunks:
            chunk.attend(by_head, q, out)
        for group in self._groups:
            group.attend(by_head, q, out)
        return out


def group_by_size(pages: Sequence[int]) -> list[list[int]]:
    """Group sequences, given by their pages, so that padding each group to its longest wastes little.

    Returns indices into `pages`; the longest of a group comes first.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(pages)), key=lambda i: -pages[i]):
        longest = pages[groups[-1][0]] if groups else 0
        allowed = max(PADDING_PAGES_FREE, int(longest * PADDING_SHARE_MAX))
        if groups and longest - pages[index] <= allowed:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _gather(by_head: torch.Tensor, pages: torch.Tensor, sequences: int, tokens: int) -> torch.Tensor:
    """Copy pages of one layer (2, kv_heads, pages, P, D) into (2, kv_heads, sequences, tokens, D)."""
    copied = by_head.index_select(2, pages)
    kv, heads, _, _, dim = copied.shape
    return copied.view(kv, heads, sequences, -1, dim)[:, :, :, :tokens]


@dataclass(frozen=True, slots=True)
class _Tile:
    first: int
    last: int
    keys: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence."""

    pages: torch.Tensor
    tokens: int
    tiles: tuple[_Tile, ...]

    @classmethod
    def of(cls, table: BatchTable, index: int, first: int, page_tokens: int) -> "_Chunk":
        start, length = table.starts[index], table.lengths[index]
        tokens = start + length
        pages = table.block_tables[index, : -(-tokens // page_tokens)]
        cuts = range(0, length, TILE_QUERIES)
        tiles = [_tile(first, start, cut, min(cut + TILE_QUERIES, length), pages.device) for cut in cuts]
        return cls(pages, tokens, tuple(tiles))

    def attend(self, by_head: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        k, v = _gather(by_head, self.pages, 1, self.tokens)  # (kv_heads, 1, tokens, D): one for all heads of a group
        by_group = (q.shape[0], k.shape[0], -1, q.shape[2])
        grouped, results = (x.view(by_group).permute(1, 2, 0, 3) for x in (q, out))
        k, v = (x.expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
        for tile in self.tiles:
            results[:, :, tile.first : tile.last] = scaled_dot_product_attention(
                grouped[:, :, tile.first : tile.last],
                k[:, :, : tile.keys],
                v[:, :, : tile.keys],
                attn_mask=tile.mask,
            )


def _tile(first: int, start: int, begin: int, end: int, device: torch.device) -> _Tile:
    """Make the tile of queries [begin, end) of a chunk that lies at `first` in the batch and follows `start` tokens."""
    keys = start + end
    causal = torch.full((end - begin, keys), float("-inf"), device=device).triu_(start + begin + 1)
    return _Tile(first + begin, first + end, keys, causal)


@dataclass(frozen=True, slots=True)
class _Group:
    """One token each of several sequences."""

    rows: torch.Tensor
    pages: torch.Tensor
    tokens: int
    mask: torch.Tensor | None

    @classmethod
    def of(cls, table: BatchTable, members: list[int], rows: list[int], page_tokens: int) -> "_Group":
        device = table.block_tables.device
        used = [table.starts[i] + 1 for i in members]
        tokens = max(used)
        pages = table.block_tables[members, : -(-tokens // page_tokens)].flatten()
        mask = _padding_mask(used, tokens, device) if len(members) > 1 else None
        return cls(torch.tensor(rows, device=device), pages, tokens, mask)

    def attend(self, by_head: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        k, v = _gather(by_head, self.pages, len(self.rows), self.tokens).transpose(1, 2)
        grouped = q[self.rows].view(k.shape[0], k.shape[1], -1, q.shape[2])
        attended = scaled_dot_product_attention(grouped, k, v, attn_mask=self.mask)
        out[self.rows] = attended.flatten(1, 2)


def _padding_mask(used: list[int], tokens: int, device: torch.device) -> torch.Tensor:
    """Return the (sequences, 1, 1, tokens) mask that hides what lies past each sequence's end."""
    past_end = torch.arange(tokens, device=device) >= torch.tensor(used, device=device)[:, None]
    mask = torch.zeros(past_end.shape, device=device).masked_fill_(past_end, float("-inf"))
    return mask[:, None, None]
