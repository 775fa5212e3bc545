"""From lists of pages to the few, large descriptors that a transfer is fast with."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.runner import KvMemory
from kvrelay.errors import InvalidArgument

Runs: TypeAlias = NDArray[np.int64]
"""Rows of (first remote page, first local page, pages), consecutive on both sides."""

Descriptors: TypeAlias = NDArray[np.uint64]
"""Rows of (address, bytes, device id)."""


def coalesce(remote_pages: Sequence[int], local_pages: Sequence[int]) -> Runs:
    """Join pairs of pages that follow each other on both sides into runs, in order.

    Raises:
        InvalidArgument: there are no pages, the lists differ in length, or a local page is written twice.
    """
    if not local_pages or len(remote_pages) != len(local_pages):
        raise InvalidArgument("remote_pages", f"{len(remote_pages)} remote pages for {len(local_pages)} local ones")
    if len(set(local_pages)) != len(local_pages):
        raise InvalidArgument("local_pages", "a page is named twice")
    pairs = np.array([remote_pages, local_pages], dtype=np.int64)
    breaks = np.flatnonzero((np.diff(pairs) != 1).any(axis=0)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.append(starts, len(local_pages)))
    return np.stack([pairs[0, starts], pairs[1, starts], counts], axis=1)


def check_inside(name: str, pages: Sequence[int], total: int) -> None:
    """Check that pages lie in a pool of `total`.

    Raises:
        InvalidArgument: one does not.
    """
    if min(pages) < 0 or max(pages) >= total:
        raise InvalidArgument(name, f"pages {min(pages)} to {max(pages)} are not all in a pool of {total}")


def remote_descriptors(memory: KvMemory, runs: Runs) -> Descriptors:
    """Return where the runs lie in the memory they are read from."""
    return _descriptors(memory, runs[:, 0], runs[:, 2])


def local_descriptors(memory: KvMemory, runs: Runs) -> Descriptors:
    """Return where the runs lie in the memory they are read into."""
    return _descriptors(memory, runs[:, 1], runs[:, 2])


def _descriptors(memory: KvMemory, first: NDArray[np.int64], pages: NDArray[np.int64]) -> Descriptors:
    rows = np.empty((len(first), 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(memory.base_address) + (first * memory.page_bytes).astype(np.uint64)
    rows[:, 1] = pages * memory.page_bytes
    rows[:, 2] = memory.device_id
    return rows
