"""Attention over the paged KV pool: what a backend is given and what it does.

Shapes: T tokens in a flat batch, all slices one after another; n slices; P tokens in a page; D head size. The pool is
(pages, layer, k|v, kv_head, P, D), so one layer's K or V is a strided (pages, kv_head, P, D).
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTable:
    """Which tokens of a flat batch belong to which sequence, and where their KV lies.

    Attributes:
        starts: per slice, tokens whose KV is already in the pages.
        lengths: per slice, tokens computed now; they follow the `starts` ones.
        positions: (T,) absolute position of each token, int64.
        cu_seqlens_q: (n + 1,) where each slice begins in the flat batch, int32.
        seqused_k: (n,) tokens each slice's last token attends to, int32.
        block_tables: (n, most pages) pages of each slice, int32; rows are filled up with their own last page,
            so that padding never reads what another sequence wrote.
        slot_pages: (T,) page of each token, int64.
        slot_offsets: (T,) place of each token in its page, int64.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    positions: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_tables: torch.Tensor
    slot_pages: torch.Tensor
    slot_offsets: torch.Tensor


class BatchAttention(Protocol):
    """Attention of one batch; made anew for each, used layer by layer."""

    def write_kv(self, layer: int, kv: torch.Tensor) -> None:
        """Write keys and values (T, 2, kv_heads, D), rotated already, into the batch's pages."""
        ...

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend causally with queries (T, heads, D), rotated already; returns (T, heads, D).

        Call after `write_kv` of the same layer: the batch's own tokens are read from the pages too.
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute attention.

    Attributes:
        name: as in the configuration.
        page_multiple: page sizes must be multiples of this many tokens.
    """

    name: str
    page_multiple: int

    def begin(self, pool: torch.Tensor, table: BatchTable) -> BatchAttention:
        """Prepare a batch; what all layers share (masks, groups) is worked out here, once."""
        ...
