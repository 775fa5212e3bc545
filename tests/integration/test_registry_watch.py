"""A watcher's mirror equals the store, whatever happens to registry and store."""

import asyncio

import pytest
from support.registry import MODEL, Member, Mirror, keys_of, registry, replica_of, until_done

from kv_registry import feed as feed_module
from kvrelay.errors import InvalidArgument, KvrelayError, Unavailable


async def test_an_empty_model_can_be_watched_before_its_first_member(valkey_url):
    async with registry(valkey_url) as (_, client), Mirror().following(client) as mirror:
        assert mirror.holds()
        member = Member(client, replica_of("a"))
        await member.register()
        await member.publish(keys_of(1, 10))
        await until_done(lambda: mirror.holds(member), "first member seen")


async def test_a_watch_resumes_without_reset_over_a_restart_of_the_registry(valkey_url):
    mirror = Mirror()
    async with registry(valkey_url) as (_, client):
        member = Member(client, replica_of("a"))
        await member.register()
        async with mirror.following(client):
            await member.publish(keys_of(1, 10))
            await until_done(lambda: mirror.holds(member), "seen")
        await member.publish(keys_of(2, 10))
        member.keys = set(keys_of(3, 100))
        await member.snapshot()
        await member.publish(keys_of(4, 10))
    async with registry(valkey_url) as (_, client):
        other = Member(client, replica_of("b"))
        await other.register()
        async with mirror.following(client):
            assert mirror.holds(member, other)
            assert mirror.resets == 1


async def test_a_watch_over_two_registries_sees_what_comes_through_either(valkey_url):
    async with (
        registry(valkey_url) as (_, one),
        registry(valkey_url) as (_, two),
        Mirror().following(one) as first,
        Mirror().following(two) as second,
    ):
        members = Member(one, replica_of("a")), Member(two, replica_of("b"))
        for number, member in enumerate(members):
            await member.register()
            await member.publish(keys_of(number, 10))
        await until_done(lambda: first.holds(*members) and second.holds(*members), "both see both")
        await members[0].deregister()
        await until_done(lambda: first.holds(members[1]) and second.holds(members[1]), "both see it gone")


async def test_a_store_emptied_under_running_watches_resets_them_and_replicas_come_back(valkey):
    async with registry(valkey.url) as (_, client):
        member = Member(client, replica_of("a"))
        await member.register()
        await member.publish(keys_of(1, 10))
        async with Mirror().following(client) as mirror:
            valkey.empty()
            await until_done(lambda: mirror.resets == 2 and mirror.caught_up > 1, "reset")
            assert mirror.holds()
            assert (await member.beat()).register_again
            await member.register()
            assert await member.snapshot()
            await until_done(lambda: mirror.holds(member), "back")


async def test_a_store_restarted_empty_resets_watches_and_they_go_on_by_themselves(valkey):
    async with registry(valkey.url) as (_, client):
        member = Member(client, replica_of("a"))
        await member.register()
        await member.publish(keys_of(1, 10))
        async with Mirror().following(client) as mirror:
            valkey.kill()
            with pytest.raises(Unavailable):
                await member.beat()
            assert mirror.holds(member)
            valkey.start()
            await member.register()
            assert await member.snapshot()
            await until_done(lambda: mirror.resets > 1 and mirror.holds(member), "converged")


async def test_a_trimmed_position_loads_the_sets_again(valkey):
    mirror = Mirror()
    async with registry(valkey.url) as (_, client):
        member = Member(client, replica_of("a"))
        await member.register()
        async with mirror.following(client):
            pass
        for step in range(20):
            await member.publish(keys_of(step, 4))
        with valkey.client() as redis:
            (stream,) = valkey.keys("stream")
            redis.xtrim(stream, maxlen=3, approximate=False)
        async with mirror.following(client):
            assert mirror.holds(member)
            assert mirror.resets == 2


@pytest.mark.parametrize("position", ["nonsense", "0123:99", ":5", "x:-1", "a:b:c"])
async def test_a_position_of_another_store_loads_the_sets(valkey_url, position):
    async with registry(valkey_url) as (_, client):
        member = Member(client, replica_of("a"))
        await member.register()
        mirror = Mirror(position=position)
        async with mirror.following(client):
            assert mirror.resets == 1
            assert mirror.holds(member)


async def test_a_slow_watcher_falls_back_and_loses_nothing(valkey_url, monkeypatch):
    monkeypatch.setattr(feed_module, "TAP_ITEMS_MAX", 4)
    async with registry(valkey_url) as (_, client), Mirror().following(client) as mirror:
        member = Member(client, replica_of("a"))
        await member.register()
        await asyncio.gather(*(member.send(member.batch(keys_of(step, 4))) for step in range(60)))
        await member.snapshot()
        await until_done(lambda: mirror.holds(member), "all seen")


async def test_watching_ends_the_reader_with_its_last_watcher(valkey_url):
    async with registry(valkey_url) as (process, client):
        feeds = process._feeds
        async with Mirror().following(client), Mirror().following(client):
            assert feeds.followed == [MODEL]
        await until_done(lambda: feeds.followed == [], "reader ended")


async def test_a_watch_needs_a_store_and_a_model(valkey):
    async with registry(valkey.url) as (_, client):
        with pytest.raises(InvalidArgument):
            await anext(client.watch(""))
        valkey.kill()
        events = client.watch(MODEL)
        with pytest.raises(KvrelayError) as caught:
            async for _ in events:
                pass
        assert isinstance(caught.value, Unavailable)


async def test_sets_that_change_while_a_watcher_loads_come_out_right(valkey_url):
    async with registry(valkey_url) as (_, client):
        members = [Member(client, replica_of(f"r{number}")) for number in range(4)]
        for member in members:
            await member.register()

        async def churn(member):
            for step in range(25):
                await member.publish(keys_of(hash((member.peer.replica_id, step)), 20), sorted(member.keys)[:5])
                if step == 12:
                    await member.snapshot()

        async def watch_in_the_middle():
            async with Mirror().following(client) as mirror:
                await until_done(lambda: done.is_set() and mirror.holds(*members), "equal in the end")

        done = asyncio.Event()
        watchers = [asyncio.create_task(watch_in_the_middle()) for _ in range(3)]
        await asyncio.gather(*map(churn, members))
        done.set()
        await asyncio.gather(*watchers)
