"""Lays slices out as one flat batch of tensors."""

import array
from itertools import accumulate

import torch

from kvrelay.engine.attention import BatchTable
from kvrelay.engine.runner import Slice
from kvrelay.errors import InternalError


def flat_ids(batch: list[Slice], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return the (T,) ids computed now, int64.

    Raises:
        InternalError: an id is not in the vocabulary; whoever took the request in should have refused it.
    """
    ids = array.array("I")
    for part in batch:
        ids.extend(part.ids[part.start : part.start + part.length])
    flat = torch.frombuffer(ids, dtype=torch.int32).to(device, torch.int64)
    if not 0 <= int(flat.min()) <= int(flat.max()) < vocab_size:
        raise InternalError(f"a batch holds a token id that is not below the vocabulary's size of {vocab_size}")
    return flat


def batch_table(batch: list[Slice], page_tokens: int, device: torch.device) -> BatchTable:
    """Return where every token of a batch belongs."""
    starts = tuple(part.start for part in batch)
    lengths = tuple(part.length for part in batch)
    per_slice = torch.tensor(lengths)
    owners = torch.arange(len(batch)).repeat_interleave(per_slice)
    firsts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = torch.arange(len(owners)) - firsts[owners] + torch.tensor(starts)[owners]
    tables = _block_tables(batch, page_tokens)
    return BatchTable(
        starts=starts,
        lengths=lengths,
        positions=positions.to(device),
        cu_seqlens_q=firsts.to(device),
        seqused_k=torch.tensor([part.start + part.length for part in batch], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_pages=tables[owners, positions // page_tokens].to(device, torch.int64),
        slot_offsets=(positions % page_tokens).to(device),
    )


def tails_begun(batch: list[Slice], page_tokens: int) -> list[int]:
    """Return the pages that a batch begins to fill and does not fill up."""
    return [
        part.pages[end // page_tokens]
        for part in batch
        if (end := part.start + part.length) % page_tokens and end // page_tokens * page_tokens >= part.start
    ]


def _block_tables(batch: list[Slice], page_tokens: int) -> torch.Tensor:
    used = [part.pages[: -(-(part.start + part.length) // page_tokens)] for part in batch]
    width = max(len(pages) for pages in used)
    return torch.tensor([[*pages, *pages[-1:] * (width - len(pages))] for pages in used], dtype=torch.int32)
