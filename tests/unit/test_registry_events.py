"""Positions, and what a reader has already seen."""

import re
from pathlib import Path

import pytest

from kv_registry.events import Horizon, Position, Record
from kv_registry.names import Names, member_of, split_member

LUA = Path(__file__).parents[2] / "kv_registry" / "lua"


def _record(number, kind="blocks", replica_id="a"):
    return Record(number, {b"kind": kind.encode(), b"id": replica_id.encode()})


def test_a_position_comes_back_from_its_text():
    position = Position("abc", 17).at(18)
    assert Position.parse(position.text) == Position("abc", 18)


@pytest.mark.parametrize("text", ["", ":", ":3", "abc", "abc:", "abc:-1", "abc:1.5", "abc:x"])
def test_what_is_no_position_is_none(text):
    assert Position.parse(text) is None


def test_events_that_a_set_already_shows_are_passed_over_for_that_replica_only():
    horizon = Horizon()
    horizon.know("a", 5)
    assert [horizon.has_passed(_record(number)) for number in (4, 5, 6)] == [True, True, False]
    assert not horizon.has_passed(_record(4, replica_id="b"))


def test_changes_without_a_base_are_passed_over_until_the_replica_enters_again():
    horizon = Horizon()
    horizon.mute("a")
    assert horizon.has_passed(_record(1))
    assert horizon.has_passed(_record(2, "snapshot"))
    assert not horizon.has_passed(_record(3, "beat"))
    assert not horizon.has_passed(_record(4, "replica"))
    assert not horizon.has_passed(_record(5))


def test_all_keys_of_a_model_share_one_hash_tag():
    names = Names("a}b{c:d")
    keys = [names.meta, names.stream, *names.booking, names.blocks("r{}", "i"), names.void("r", "i")]
    assert {re.search(r"\{(.*?)\}", key).group(1) for key in keys} == {"a%7Db%7Bc%3Ad"}


def test_members_come_back_from_their_names():
    assert split_member(member_of("odd/name", "abc").encode()) == ("odd/name", "abc")


@pytest.mark.parametrize("path", sorted(LUA.glob("*.lua")), ids=lambda path: path.stem)
def test_scripts_are_short_say_their_units_and_never_walk_the_store(path):
    text = path.read_text()
    first = text.partition("\n")[0]
    assert first.startswith("-- ")
    assert re.search(r"\b(ms|µs|no units|Pure)\b", first), "the first line tells the units"
    assert not re.search(r"'(KEYS|SCAN|FLUSHALL|FLUSHDB)'", text)
    assert len(text.splitlines()) <= 120
