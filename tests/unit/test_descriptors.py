"""Pages become few descriptors that cover the same bytes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.runner import KvMemory
from kvrelay.errors import InvalidArgument
from kvrelay.kv.descriptors import check_inside, coalesce, local_descriptors, remote_descriptors

PAGES = 64
page = st.integers(0, PAGES - 1)


@given(local=st.lists(page, min_size=1, unique=True), data=st.data())
def test_runs_name_the_same_pairs_in_order_and_cannot_be_joined_further(local, data):
    remote = data.draw(st.lists(page, min_size=len(local), max_size=len(local)))
    runs = coalesce(remote, local).tolist()
    pairs = [(there + i, here + i) for there, here, count in runs for i in range(count)]
    assert pairs == list(zip(remote, local, strict=True))
    for (there, here, count), (next_there, next_here, _) in itertools.pairwise(runs):
        assert (there + count, here + count) != (next_there, next_here)


def test_consecutive_pages_are_one_run():
    assert coalesce(range(5, 15), range(20, 30)).tolist() == [[5, 20, 10]]


def test_descriptors_lie_where_the_pages_do():
    base = 0x7FFF_0000_0000
    memory = KvMemory(base, PAGES, 4096, device_id=3)
    runs = coalesce([1, 2, 9], [4, 5, 7])
    assert remote_descriptors(memory, runs).tolist() == [[base + 4096, 8192, 3], [base + 9 * 4096, 4096, 3]]
    assert local_descriptors(memory, runs).tolist() == [[base + 4 * 4096, 8192, 3], [base + 7 * 4096, 4096, 3]]


def test_addresses_above_the_signed_range_are_kept():
    base = 2**64 - PAGES * 4096
    assert local_descriptors(KvMemory(base, PAGES, 4096), coalesce([0], [1])).tolist() == [[base + 4096, 4096, 0]]


@pytest.mark.parametrize(("remote", "local"), [([], []), ([1], []), ([1, 2], [3]), ([1, 2], [3, 3])])
def test_lists_that_do_not_fit_are_refused(remote, local):
    with pytest.raises(InvalidArgument):
        coalesce(remote, local)


@pytest.mark.parametrize("pages", [[-1], [0, PAGES]])
def test_pages_outside_the_pool_are_refused(pages):
    with pytest.raises(InvalidArgument, match="local_pages"):
        check_inside("local_pages", pages, PAGES)
