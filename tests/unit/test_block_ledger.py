"""What the registry is told of a replica's blocks."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.directory import BlockBatch
from kvrelay.kv.keys import xor_keys
from kvrelay.replica.blocks import BATCH_KEYS_MAX, BlockLedger


def key(number: int) -> bytes:
    return number.to_bytes(16)


class Registry:
    """Checks what the store checks: seq without gaps, count and XOR after each batch."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.seq = 0

    def take(self, batch: BlockBatch) -> None:
        assert batch.seq == self.seq + 1
        assert not set(batch.added) & set(batch.removed)
        self.keys -= set(batch.removed)
        self.keys |= set(batch.added)
        self.seq = batch.seq
        self.agrees(batch.count, batch.xor)

    def swap(self, seq: int, keys: list[bytes]) -> None:
        assert seq > self.seq
        self.seq, self.keys = seq, set(keys)

    def agrees(self, count: int, xor: bytes) -> None:
        assert count == len(self.keys)
        assert xor == xor_keys(self.keys)


def publish_all(ledger: BlockLedger, registry: Registry) -> None:
    while (batch := ledger.batch()) is not None:
        registry.take(batch)
        ledger.acknowledge()


def test_batches_are_numbered_and_carry_count_and_xor_of_the_set_after_them():
    ledger, registry = BlockLedger(), Registry()
    ledger.change([key(1), key(2)], [])
    publish_all(ledger, registry)
    ledger.change([key(3)], [key(1)])
    publish_all(ledger, registry)
    assert registry.keys == {key(2), key(3)}
    assert registry.seq == 2


def test_nothing_new_is_no_batch():
    ledger = BlockLedger()
    assert ledger.batch() is None
    ledger.change([key(1)], [])
    ledger.change([], [key(1)])
    assert ledger.batch() is None


def test_a_batch_stays_the_same_until_it_is_acknowledged():
    ledger = BlockLedger()
    ledger.change([key(1)], [])
    first = ledger.batch()
    ledger.change([key(2)], [])
    assert ledger.batch() is first
    ledger.acknowledge()
    assert ledger.batch().added == (key(2),)


def test_a_large_change_is_told_in_bounded_batches_parents_first():
    ledger = BlockLedger()
    keys = [key(i) for i in range(2 * BATCH_KEYS_MAX + 1)]
    ledger.change(keys, [])
    told: list[bytes] = []
    while (batch := ledger.batch()) is not None:
        assert len(batch.added) <= BATCH_KEYS_MAX
        told += batch.added
        ledger.acknowledge()
    assert told == keys


def test_a_snapshot_carries_everything_and_batches_go_on_after_it():
    ledger, registry = BlockLedger(), Registry()
    ledger.change([key(1)], [])
    publish_all(ledger, registry)
    ledger.change([key(2)], [])
    ledger.batch()
    ledger.change([key(3)], [])
    registry.swap(*ledger.snapshot())
    assert registry.keys == {key(1), key(2), key(3)}
    ledger.change([], [key(2)])
    publish_all(ledger, registry)
    assert registry.keys == {key(1), key(3)}


def test_a_new_epoch_begins_with_an_empty_set_at_zero():
    ledger = BlockLedger()
    ledger.change([key(1), key(2)], [])
    publish_all(ledger, Registry())
    ledger.restart()
    registry = Registry()
    publish_all(ledger, registry)
    assert registry.keys == {key(1), key(2)}


@given(st.integers(0, 2**32), st.lists(st.sampled_from(["change", "publish", "snapshot", "restart"]), max_size=60))
def test_whatever_happens_the_registry_ends_with_what_the_engine_holds(seed, steps):
    draw = random.Random(seed)
    ledger, registry, held = BlockLedger(), Registry(), set()
    for step in [*steps, "publish"]:
        match step:
            case "change":
                added = {key(draw.randrange(1, 20)) for _ in range(3)} - held
                removed = {each for each in held if draw.random() < 0.3}
                held = held - removed | added
                ledger.change(added, removed)
            case "publish":
                publish_all(ledger, registry)
            case "snapshot":
                registry.swap(*ledger.snapshot())
            case "restart":
                ledger.restart()
                registry = Registry()
    assert registry.keys == held
