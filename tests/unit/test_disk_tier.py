"""The disk tier: what was put comes back byte for byte or not at all."""

import logging
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.kv.tiers.disk import SUFFIX, TEMPORARY, DiskTier
from kvrelay.kv.tiers.page_file import Header, checksum, decode, encode
from kvrelay.kv.tiers.tier import Outcome, PageKeys, TierError

IDENTITY = bytes(range(32))
PAGE_BYTES = 5000
BLOCKS = 2
PAGES = 12


def keys_of(number, parent=None):
    """A page whose name tells its number; numbers below a power of two continue half their number."""
    blocks = tuple(bytes([block + 1, *number.to_bytes(15, "big")]) for block in range(BLOCKS))
    return PageKeys(blocks, parent)


def page(number):
    """Pages 1, 2, 3, … form a binary tree below page 1."""
    return keys_of(number, keys_of(number // 2).name if number > 1 else None)


def content(number):
    return memoryview(random.Random(number).randbytes(PAGE_BYTES))


@pytest.fixture
def open_tier(tmp_path):
    opened = []

    def opens(*, folder=tmp_path / "tier", pages=PAGES, identity=IDENTITY):
        for tier in opened:
            tier.close()
        opened.clear()
        tier = DiskTier(
            folder, identity=identity, page_bytes=PAGE_BYTES, blocks_per_page=BLOCKS, bytes_max=pages * 9096
        )
        opened.append(tier)
        assert tier.file_bytes == 9096
        return tier

    yield opens
    for tier in opened:
        tier.close()


def put(tier, *numbers):
    for number in numbers:
        assert tier.put(page(number), content(number)).done, number


def read(tier, number):
    """Return the page's bytes, or None for a miss."""
    into = memoryview(bytearray(PAGE_BYTES))
    return bytes(into) if tier.get(page(number), into).done else None


def path_of(folder, number):
    return folder / "tier" / (page(number).name.hex() + SUFFIX)


def held(tier):
    return {int.from_bytes(each.name[1:], "big") for each in tier.pages()}


def test_a_page_comes_back_as_it_was(open_tier):
    tier = open_tier()
    put(tier, 1, 2, 3)
    assert read(tier, 2) == content(2)
    assert read(tier, 5) is None
    assert tier.bytes_used == 3 * tier.file_bytes


def test_a_page_is_refused_without_its_parent_and_a_second_time(open_tier):
    tier = open_tier()
    assert tier.put(page(2), content(2)) == Outcome(done=False)
    put(tier, 1)
    assert tier.put(page(1), content(1)) == Outcome(done=False)


def test_a_full_tier_drops_the_least_recently_used_pages_children_first(open_tier):
    tier = open_tier(pages=3)
    put(tier, 1, 2, 3)
    assert read(tier, 2)
    assert [each.name for each in tier.put(page(4), content(4)).gone] == [page(3).name]
    assert held(tier) == {1, 2, 4}
    assert sorted(path.name for path in tier._folder.glob(f"*{SUFFIX}")) == sorted(
        each.name.hex() + SUFFIX for each in tier.pages()
    )


def test_a_chain_longer_than_the_tier_stops_at_its_bound(open_tier):
    tier = open_tier(pages=3)
    put(tier, 1, 2, 4)
    assert not tier.put(page(8), content(8)).done
    assert held(tier) == {1, 2, 4}


def test_another_start_finds_the_pages_and_their_order_of_use(open_tier, tmp_path):
    put(open_tier(), 1, 2, 3, 4)
    for age, number in enumerate((2, 4, 1, 3)):
        os.utime(path_of(tmp_path, number), (age, age))
    again = open_tier(pages=4)
    assert held(again) == {1, 2, 3, 4}
    assert read(again, 4) == content(4)
    again = open_tier(pages=2)
    assert held(again) == {1, 2}


@pytest.mark.parametrize("identity", [bytes(32)])
def test_pages_of_another_model_are_dropped(open_tier, tmp_path, identity):
    put(open_tier(), 1, 2)
    assert held(open_tier(identity=identity)) == set()
    assert not path_of(tmp_path, 1).exists()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def truncate_in_header(path):
    os.truncate(path, 100)


def empty(path):
    os.truncate(path, 0)


def grow(path):
    with path.open("ab") as file:
        file.write(b"x")


def flip_a_bit_of_the_page(path):
    flip(path, path.stat().st_size - 17)


def flip_a_bit_of_the_header(path):
    flip(path, 20)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def delete(path):
    path.unlink()


def another_page(path):
    path.write_bytes(path.with_name(page(3).name.hex() + SUFFIX).read_bytes())


DAMAGES = [
    truncate,
    truncate_in_header,
    empty,
    grow,
    flip_a_bit_of_the_page,
    flip_a_bit_of_the_header,
    delete,
    another_page,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_is_logged_and_goes_with_what_follows_it(open_tier, tmp_path, damage, caplog):
    tier = open_tier()
    put(tier, 1, 2, 3, 4)
    damage(path_of(tmp_path, 2))
    into = memoryview(bytearray(PAGE_BYTES))
    with caplog.at_level(logging.WARNING):
        outcome = tier.get(page(2), into)
    assert not outcome.done
    assert [each.name for each in outcome.gone] == [page(4).name, page(2).name]
    assert [record.message for record in caplog.records] == ["tier_page_bad"]
    assert held(tier) == {1, 3}
    assert not path_of(tmp_path, 2).exists()
    assert not path_of(tmp_path, 4).exists()
    put(tier, 2)
    assert read(tier, 2) == content(2)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_damaged_between_two_starts_is_never_wrong_bytes(open_tier, tmp_path, damage):
    put(open_tier(), 1, 2, 3, 4)
    damage(path_of(tmp_path, 2))
    tier = open_tier()
    assert read(tier, 2) is None
    assert read(tier, 3) == content(3)
    assert held(tier) == {1, 3}


def test_what_a_crash_left_half_written_is_removed(open_tier, tmp_path):
    put(open_tier(), 1)
    left = path_of(tmp_path, 2).with_suffix(TEMPORARY)
    left.write_bytes(b"half")
    open_tier()
    assert not left.exists()


def test_a_directory_has_one_user_at_a_time(open_tier, tmp_path):
    tier = open_tier()
    with pytest.raises(TierError, match="another process uses it"):
        DiskTier(tmp_path / "tier", identity=IDENTITY, page_bytes=PAGE_BYTES, blocks_per_page=BLOCKS, bytes_max=10_000)
    put(tier, 1)


def test_a_place_that_is_no_directory_is_told(open_tier, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="file"):
        open_tier(folder=tmp_path / "file" / "below")


def test_a_full_disk_is_told_and_leaves_no_half_page(open_tier, tmp_path, monkeypatch):
    tier = open_tier()
    put(tier, 1)
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: write(file, [parts[0]], at))
    with pytest.raises(TierError, match="No space left"):
        tier.put(page(2), content(2))
    assert {path.suffix for path in (tmp_path / "tier").iterdir()} == {SUFFIX, ""}
    assert held(tier) == {1}


def test_a_header_survives_the_round_trip_and_no_flipped_bit():
    header = Header(IDENTITY, page(3), PAGE_BYTES, checksum(content(3)))
    data = encode(header)
    assert decode(data) == header
    for bit in range(8 * len(data.rstrip(b"\0"))):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode(bytes(flipped)) is None, bit


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "touch", "remove", "restart", "damage"]), st.integers(1, 15)), max_size=40
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, pages=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_any_history_gives_right_bytes_or_misses(tmp_path_factory, actions, pages, seed):
    """The model is the set of pages that may be there; the tier may hold fewer, never others and never other bytes."""
    folder, rng = tmp_path_factory.mktemp("tier"), random.Random(seed)

    def opened():
        return DiskTier(
            folder / "tier", identity=IDENTITY, page_bytes=PAGE_BYTES, blocks_per_page=BLOCKS, bytes_max=pages * 9096
        )

    tier, model, damaged = opened(), set(), set()
    try:
        for what, number in actions:
            if what == "put":
                outcome = tier.put(page(number), content(number))
                model -= {int.from_bytes(each.name[1:], "big") for each in outcome.gone}
                model |= {number} if outcome.done else set()
                damaged -= {number} if outcome.done else set()
            elif what == "get":
                got = read(tier, number)
                assert got in (None, bytes(content(number)))
                assert (got is not None) == (number in model and number not in damaged)
            elif what == "touch":
                tier.touch([page(number).name])
            elif what == "remove":
                tier.remove(page(number).name)
            elif what == "restart":
                tier.close()
                tier = opened()
            elif number in model:
                rng.choice(DAMAGES[:-2])(path_of(folder, number))
                damaged.add(number)
            model &= held(tier)
            damaged &= model
            assert held(tier) == model
            assert all(number == 1 or number // 2 in model for number in model)
            assert tier.bytes_used <= tier.bytes_max
            tier._index.check_integrity()
    finally:
        tier.close()
