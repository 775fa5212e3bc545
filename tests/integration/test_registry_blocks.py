"""Each replica's block set in the directory stays what the replica says, or is mended by a snapshot."""

import random
import time
from dataclasses import replace

import pytest
from support.registry import CALL_S, MODEL, Member, Mirror, keys_of, registry, replica_of, until_done

from kv_registry.blocks import BATCH_KEYS_MAX
from kvrelay.directory import Answer
from kvrelay.errors import InvalidArgument

SNAPSHOT = Answer(snapshot_wanted=True)


@pytest.fixture
async def client(valkey_url):
    async with registry(valkey_url) as (_, client):
        yield client


@pytest.fixture
async def member(client):
    member = Member(client, replica_of("a"))
    await member.register()
    return member


async def _mirrored(client, *members):
    async with Mirror().following(client) as mirror:
        return mirror.holds(*members)


async def test_batches_change_the_set_and_reach_watchers(client, member):
    first = keys_of(1, 10)
    async with Mirror().following(client) as mirror:
        assert await member.publish(first) == Answer()
        assert await member.publish(keys_of(2, 5), first[:3]) == Answer()
        await until_done(lambda: mirror.holds(member), "seen")
        assert mirror.resets == 1
    assert await _mirrored(client, member)


async def test_events_before_the_first_seen_one_are_not_lost(client, member):
    await member.publish(keys_of(1, 10))
    async with Mirror().following(client) as mirror:
        assert mirror.holds(member)
        await member.publish(keys_of(2, 10))
        await until_done(lambda: mirror.holds(member), "seen")


async def test_a_gap_in_seq_changes_nothing_and_a_snapshot_mends_it(client, member):
    await member.publish(keys_of(1, 10))
    before = set(member.keys)
    member.batch(keys_of(2, 10))  # lost on its way
    async with Mirror().following(client) as mirror:
        assert await member.publish(keys_of(3, 10)) == SNAPSHOT
        assert mirror.blocks["a"] == before
        assert await member.beat() == SNAPSHOT
        assert await member.snapshot()
        await until_done(lambda: mirror.holds(member), "mended")
        assert await member.beat() == Answer()
        assert await member.publish(keys_of(4, 10)) == Answer()
        await until_done(lambda: mirror.holds(member), "goes on")
        assert mirror.resets == 1


@pytest.mark.parametrize("wrong", [{"xor": bytes(16)}, {"count": 11}], ids=["xor", "count"])
async def test_a_batch_that_does_not_fit_changes_nothing_and_a_snapshot_mends_it(client, member, wrong):
    await member.publish(keys_of(1, 5))
    before = set(member.keys)
    batch = member.batch(keys_of(2, 5), list(before)[:1])
    assert await member.send(replace(batch, **wrong)) == SNAPSHOT
    async with Mirror().following(client) as mirror:
        assert mirror.blocks["a"] == before
    assert await member.snapshot()
    assert await _mirrored(client, member)


async def test_an_unknown_removed_block_does_not_lose_the_rest_of_the_batch(client, member):
    held = keys_of(1, 10)
    await member.publish(held)
    assert await member.publish(keys_of(2, 5), [*keys_of(3, 4), *held[:2], *keys_of(4, 4)]) == Answer()
    assert await _mirrored(client, member)


async def test_keys_told_twice_count_once(client, member):
    keys = keys_of(1, 10)
    await member.publish(keys)
    assert await member.publish([*keys, *keys_of(2, 3), *keys_of(2, 3)]) == Answer()
    assert await _mirrored(client, member)


async def test_all_blocks_cleared_is_honoured(client, member):
    async with Mirror().following(client) as mirror:
        await member.publish(keys_of(1, 10))
        assert await member.publish(keys_of(2, 3), cleared=True) == Answer()
        await until_done(lambda: mirror.holds(member), "cleared and refilled")
        assert await member.publish(cleared=True) == Answer()
        await until_done(lambda: mirror.holds(member), "cleared")


async def test_a_batch_whose_answer_was_lost_may_be_sent_again(client, member):
    batch = member.batch(keys_of(1, 10))
    assert await member.send(batch) == Answer()
    assert await member.send(batch) == Answer()
    assert await _mirrored(client, member)


async def test_a_batch_that_is_too_large_comes_as_a_snapshot(client, member):
    batch = member.batch(keys_of(1, BATCH_KEYS_MAX + 1))
    assert await member.send(batch) == SNAPSHOT
    assert await member.snapshot()
    assert await _mirrored(client, member)


async def test_a_large_snapshot_goes_in_chunks_and_an_empty_one_empties(client, member):
    async with Mirror().following(client) as mirror:
        member.keys = set(keys_of(1, 30_000))
        assert await member.snapshot()
        await until_done(lambda: mirror.holds(member), "30,000 keys seen")
        member.keys = set()
        assert await member.snapshot()
        await until_done(lambda: mirror.holds(member), "empty set seen")


async def test_a_snapshot_of_a_lapsed_registration_is_not_taken(client, member):
    await Member(client, replica_of("a", "a2")).register()
    assert not await member.snapshot()


async def test_a_failed_snapshot_leaves_nothing_behind(client, member, valkey):
    member.keys = set(keys_of(1, 10))
    await member.snapshot()
    keys = list(member.keys)
    accepted = await client.put_snapshot(
        member.peer, model=MODEL, epoch=member.epoch, seq=0, keys=[*keys, keys[0]], timeout_s=CALL_S
    )
    assert not accepted
    assert valkey.keys("staged") == []
    assert await _mirrored(client, member)


async def test_keys_of_a_wrong_length_are_refused(member):
    batch = member.batch([b"short"])
    with pytest.raises(InvalidArgument) as caught:
        await member.send(batch)
    assert caught.value.field == "added_keys"


async def test_random_changes_keep_store_and_watchers_equal_to_the_replicas(client, member):
    source = random.Random(5)
    other = Member(client, replica_of("b"))
    await other.register()
    async with Mirror().following(client) as mirror:
        for step in range(60):
            who = source.choice((member, other))
            added = keys_of(1000 + step, source.randrange(40))
            removed = source.sample(sorted(who.keys), min(len(who.keys), source.randrange(20)))
            if source.random() < 0.1:
                who.batch(added)  # lost on its way
                continue
            if (await who.publish(added, removed, cleared=source.random() < 0.1)).snapshot_wanted:
                assert await who.snapshot()
        for who in (member, other):
            if (await who.publish()).snapshot_wanted:
                assert await who.snapshot()
        await until_done(lambda: mirror.holds(member, other), "same sets")
        assert mirror.resets == 1
    assert await _mirrored(client, member, other)


async def test_time_of_a_batch_of_64_keys(member):
    times = []
    for step in range(100):
        batch = member.batch(keys_of(step, 64))
        began_s = time.monotonic()
        assert await member.send(batch) == Answer()
        times.append(time.monotonic() - began_s)
    print(f"publish 64 keys, gRPC + Redis: p50 {1000 * sorted(times)[50]:.2f} ms")
