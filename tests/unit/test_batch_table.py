import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.attention.cpu import PADDING_PAGES_FREE, PADDING_SHARE_MAX, group_by_size
from kvrelay.engine.batch_table import batch_table, flat_ids, tails_begun
from kvrelay.engine.runner import Slice
from kvrelay.errors import InternalError

CPU = torch.device("cpu")
PAGE_TOKENS = 4


def slice_of(start: int, length: int, pages: list[int]) -> Slice:
    return Slice(array.array("I", range(100, 100 + start + length)), start, length, array.array("I", pages))


def test_every_token_of_a_batch_has_its_place():
    batch = [slice_of(3, 1, [9]), slice_of(2, 5, [7, 1]), slice_of(0, 2, [5, 6])]
    table = batch_table(batch, PAGE_TOKENS, CPU)
    assert table.positions.tolist() == [3, 2, 3, 4, 5, 6, 0, 1]
    assert table.slot_pages.tolist() == [9, 7, 7, 1, 1, 1, 5, 5]
    assert table.slot_offsets.tolist() == [3, 2, 3, 0, 1, 2, 0, 1]
    assert table.cu_seqlens_q.tolist() == [0, 1, 6, 8]
    assert table.seqused_k.tolist() == [4, 7, 2]


def test_block_tables_are_filled_up_with_the_sequences_own_pages():
    table = batch_table([slice_of(0, 2, [5]), slice_of(2, 5, [7, 1])], PAGE_TOKENS, CPU)
    assert table.block_tables.tolist() == [[5, 5], [7, 1]]


def test_ids_are_those_of_the_slices():
    assert flat_ids([slice_of(2, 2, [0]), slice_of(0, 1, [1])], 1000, CPU).tolist() == [102, 103, 100]


@pytest.mark.parametrize("bad", [1000, 2**31, 2**32 - 1])
def test_ids_outside_the_vocabulary_are_an_error(bad: int):
    part = Slice(array.array("I", [1, bad]), 0, 2, array.array("I", [0]))
    with pytest.raises(InternalError, match="vocabulary"):
        flat_ids([part], 1000, CPU)


@pytest.mark.parametrize(
    ("start", "length", "begun"),
    [
        (0, 3, [10]),  # begins its first page
        (0, 4, []),  # fills it
        (0, 5, [11]),
        (1, 2, []),  # goes on in a page
        (1, 3, []),
        (3, 2, [11]),  # fills one, begins the next
        (4, 1, [11]),
        (3, 9, []),
    ],
)
def test_tails_begun_are_pages_started_and_not_filled(start: int, length: int, begun: list[int]):
    assert tails_begun([slice_of(start, length, [10, 11, 12])], PAGE_TOKENS) == begun


@given(st.lists(st.integers(1, 300), max_size=40))
def test_groups_hold_every_sequence_once_and_pad_little(pages: list[int]):
    groups = group_by_size(pages)
    assert sorted(index for group in groups for index in group) == list(range(len(pages)))
    for group in groups:
        longest = max(pages[index] for index in group)
        assert pages[group[0]] == longest
        allowed = max(PADDING_PAGES_FREE, longest * PADDING_SHARE_MAX)
        assert all(longest - pages[index] <= allowed for index in group)
