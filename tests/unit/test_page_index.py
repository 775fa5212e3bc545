"""Which page of a tier goes next."""

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.tiers.page_index import PageIndex
from kvrelay.kv.tiers.tier import PageKeys


def page(name, parent=None):
    return PageKeys((name.encode(),), parent and parent.encode())


def chain(*names):
    return [page(name, parent) for name, parent in zip(names, (None, *names), strict=False)]


def index_of(*pages):
    index = PageIndex()
    for each in pages:
        index.add(each)
    index.check_integrity()
    return index


def order_of_going(index):
    gone = []
    while (victim := index.next_to_go()) is not None:
        gone += [each.name.decode() for each in index.drop(victim.name)]
        index.check_integrity()
    return gone


def test_children_go_before_their_parents_and_old_chains_before_new_ones():
    assert order_of_going(index_of(*chain("a", "b", "c"), *chain("x", "y"))) == ["c", "b", "a", "y", "x"]


def test_a_chain_that_was_used_goes_after_one_that_was_not():
    index = index_of(*chain("a", "b"), *chain("x", "y"))
    for name in (b"a", b"b"):
        index.touch(name)
    assert order_of_going(index) == ["y", "x", "b", "a"]


def test_a_prefix_that_was_used_outlives_what_followed_it():
    index = index_of(*chain("a", "b", "c"), *chain("x", "y"))
    index.touch(b"a")
    index.touch(b"b")
    assert order_of_going(index) == ["c", "y", "x", "b", "a"]


def test_dropping_a_page_drops_what_follows_it():
    index = index_of(*chain("a", "b", "c"), page("d", "b"), page("e", "a"))
    assert [each.name for each in index.drop(b"b")][-1] == b"b"
    assert {each.name for each in index} == {b"a", b"e"}
    assert index.drop(b"unknown") == ()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11), st.integers(0, 11)), max_size=80))
def test_the_forest_stays_closed_whatever_is_done(actions):
    index, parents = PageIndex(), {}
    for what, number, other in actions:
        name, parent = f"{number:02}", f"{other:02}" if other < number else None
        if what == 0 and name.encode() not in index and index.takes(page(name, parent)):
            index.add(page(name, parent))
            parents[name] = parent
        elif what == 1:
            index.touch(name.encode())
        else:
            for each in index.drop(name.encode()):
                assert not any(parents[kept.name.decode()] == each.name.decode() for kept in index)
        index.check_integrity()
    assert [each.parent in {None, *(kept.name for kept in index)} for each in index].count(False) == 0
