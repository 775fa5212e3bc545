"""When final KV is announced to its puller."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config import PIECE_KIB
from kvrelay.engine.pieces import pages_to_tell, smallest_piece


@pytest.mark.parametrize(
    ("piece_kib", "page_bytes", "pages"),
    [
        (0, 1, 1),  # every page that is final
        (4, 4096, 1),
        (4, 4097, 1),
        (4, 4095, 2),
        (PIECE_KIB, 32 * 23_040, 6),  # the bundled model in bf16: less than one step of 256 tokens, so each step tells
        (PIECE_KIB, 32 * 131_072, 1),  # an 8B model: every page is a piece worth a message
        (PIECE_KIB, 64, 65_536),
    ],
)
def test_the_smallest_piece_is_whole_pages_of_at_least_so_many_bytes(piece_kib, page_bytes, pages):
    assert smallest_piece(piece_kib, page_bytes) == pages


def test_a_short_prompt_is_told_in_one_piece_when_it_is_complete():
    told = [pages_to_tell(final=final, told=0, total=5, smallest=6) for final in range(6)]
    assert told == [0, 0, 0, 0, 0, 5]


def test_a_long_prompt_is_told_as_often_as_a_piece_has_come_together():
    told, announced = 0, []
    for final in range(0, 21, 2):
        now = pages_to_tell(final=final, told=told, total=20, smallest=6)
        announced += [now] if now != told else []
        told = now
    assert announced == [6, 12, 18, 20]


def test_pages_that_the_puller_holds_already_are_no_news():
    assert pages_to_tell(final=-3, told=0, total=4, smallest=1) == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 12))
def test_everything_is_told_once_and_all_but_the_last_piece_is_large_enough(steps, smallest):
    total, final, told, pieces = sum(steps), 0, 0, []
    for step in steps:
        final += step
        now = pages_to_tell(final=final, told=told, total=total, smallest=smallest)
        assert told <= now <= final
        pieces += [now - told] if now > told else []
        told = now
    assert told == total
    assert all(piece >= smallest for piece in pieces[:-1])
