"""Who may enter, who lives, and what is left of those who do not."""

from dataclasses import replace

import grpc
import pytest
from support.registry import (
    CALL_S,
    IDENTITY,
    LAYOUT,
    MODEL,
    Member,
    Mirror,
    keys_of,
    registry,
    replica_of,
    until_done,
)

from kv_registry.store import Store
from kvrelay.directory import Answer, Leg, Pair, Reservation
from kvrelay.errors import InvalidArgument, Mismatch, StaleIncarnation, Unavailable
from kvrelay.kv.keys import make_identity
from kvrelay.v1 import kv_registry_pb2


def _identity(**changes):
    fields = {
        "model": MODEL,
        "model_fingerprint": "f1",
        "tokenizer_fingerprint": "t1",
        "block_tokens": 32,
        "context_tokens": 8192,
    }
    return make_identity(**(fields | changes))


@pytest.mark.parametrize(
    ("field", "replica"),
    [
        ("model_fingerprint", replica_of("b", identity=_identity(model_fingerprint="f2"))),
        ("tokenizer_fingerprint", replica_of("b", identity=_identity(tokenizer_fingerprint="t2"))),
        ("block_tokens", replica_of("b", identity=_identity(block_tokens=64))),
        ("key_version", replica_of("b", identity=replace(IDENTITY, key_version=2))),
        ("protocol_major", replica_of("b", identity=replace(IDENTITY, protocol_major=2))),
        ("golden_keys", replica_of("b", identity=replace(IDENTITY, golden_keys=bytes(64)))),
        *(
            (f"layout.{name}", replica_of("b", layout=replace(LAYOUT, **{name: value})))
            for name, value in {
                "axes": "layer,kv,token,head,dim",
                "layers": 3,
                "kv_heads": 2,
                "head_dim": 32,
                "dtype": "bfloat16",
                "page_tokens": 64,
                "block_tokens": 64,
                "page_bytes": 4096,
            }.items()
        ),
    ],
)
async def test_a_replica_that_differs_is_refused_with_the_field_named(valkey_url, field, replica):
    async with registry(valkey_url) as (_, client):
        await Member(client, replica_of("a")).register()
        with pytest.raises(Mismatch) as caught:
            await Member(client, replica).register()
        assert caught.value.field == field
        assert caught.value.expected != caught.value.got


async def test_the_first_difference_is_named_with_both_values(valkey_url):
    async with registry(valkey_url) as (_, client):
        await Member(client, replica_of("a")).register()
        other = replica_of("b", identity=_identity(model_fingerprint="f2", tokenizer_fingerprint="t2"))
        with pytest.raises(Mismatch) as caught:
            await Member(client, other).register()
        assert (caught.value.field, caught.value.expected, caught.value.got) == ("model_fingerprint", "f1", "f2")


async def test_another_model_goes_with_its_last_member(valkey_url):
    async with registry(valkey_url) as (_, client):
        old = Member(client, replica_of("a"))
        await old.register()
        await old.deregister()
        await Member(client, replica_of("b", identity=_identity(model_fingerprint="f2"))).register()


async def test_a_lone_replica_may_restart_with_another_model(valkey_url):
    async with registry(valkey_url) as (_, client):
        await Member(client, replica_of("a")).register()
        await Member(client, replica_of("a", "a2", identity=_identity(model_fingerprint="f2"))).register()


async def test_a_dead_members_contract_does_not_bind(valkey_url):
    async with registry(valkey_url) as (_, client):
        await Member(client, replica_of("a")).register(ttl_s=0.001)
        other = replica_of("b", identity=_identity(model_fingerprint="f2"))
        await Member(client, other).register()


async def test_a_router_learns_what_it_does_not_know_and_is_refused_where_it_differs(valkey_url):
    unknown = replace(IDENTITY, model_fingerprint="", golden_keys=b"", block_tokens=0)
    async with registry(valkey_url) as (_, client):
        with pytest.raises(Unavailable, match="no replica"):
            await client.check_router(unknown, timeout_s=CALL_S)
        await Member(client, replica_of("a")).register()
        assert await client.check_router(unknown, timeout_s=CALL_S) == IDENTITY
        with pytest.raises(Mismatch) as caught:
            await client.check_router(replace(unknown, tokenizer_fingerprint="t2"), timeout_s=CALL_S)
        assert caught.value.field == "tokenizer_fingerprint"


async def test_bad_names_and_lives_are_refused(valkey_url):
    async with registry(valkey_url) as (_, client):
        for replica, ttl_s, field in (
            (replica_of("a\n"), 5.0, "peer.replica_id"),
            (replica_of("a", "x/y"), 5.0, "peer.incarnation"),
            (replica_of("a"), 0.0, "ttl_s"),
            (replica_of("a"), float("nan"), "ttl_s"),
            (replica_of("a"), 1e9, "ttl_s"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await client.register(replica, ttl_s=ttl_s, timeout_s=CALL_S)
            assert caught.value.field == field


async def test_a_new_incarnation_voids_the_old_one_at_once(valkey_url):
    async with registry(valkey_url) as (process, client):
        old, new = Member(client, replica_of("a", "a1")), Member(client, replica_of("a", "a2"))
        await old.register()
        await old.publish(keys_of(1, 8))
        async with Mirror().following(client) as mirror:
            await client.reserve(MODEL, [_booking(old)], timeout_s=CALL_S)
            await new.register()
            await until_done(lambda: mirror.gone, "old one gone")
            assert mirror.gone == [("a", "a1", "replaced")]
            await until_done(lambda: mirror.holds(new), "new one seen, with no block")
        assert await process._store.reservations.loads(MODEL) == {}
        assert await old.beat() == Answer(register_again=True)
        assert (await old.publish(keys_of(2, 1))).register_again
        with pytest.raises(StaleIncarnation):
            await old.register()
        assert await new.beat() == Answer()


async def test_the_same_incarnation_may_register_again_and_starts_empty(valkey_url):
    async with registry(valkey_url) as (_, client):
        member = Member(client, replica_of("a"))
        await member.register()
        await member.publish(keys_of(1, 8))
        first, late = member.epoch, member.batch(keys_of(2, 1))
        await member.register()
        assert member.epoch > first
        member.keys = set()
        async with Mirror().following(client) as mirror:
            assert mirror.holds(member)
        assert await member.send(late) == Answer(snapshot_wanted=True)


async def test_a_dead_replica_its_blocks_and_its_load_are_gone_within_seconds(valkey, valkey_url):
    async with registry(valkey_url) as (process, client):
        alive, dying = Member(client, replica_of("a")), Member(client, replica_of("b"))
        await alive.register()
        await dying.register(ttl_s=0.5)
        await dying.publish(keys_of(1, 100))
        async with Mirror().following(client) as mirror:
            assert (await client.reserve(MODEL, [_booking(dying)], timeout_s=CALL_S))[0].pair == 0
            assert mirror.holds(alive, dying)
            await until_done(lambda: mirror.gone, "expired replica gone")
            assert mirror.gone == [("b", "a1", "expired")]
            assert mirror.holds(alive)
        await until_done(lambda: not valkey.keys(":b"), "its keys gone")
        assert await process._store.reservations.loads(MODEL) == {}
        assert await dying.beat() == Answer(register_again=True)
        await dying.register()


async def test_heartbeats_keep_a_replica_alive_and_tell_its_state(valkey_url):
    async with registry(valkey_url) as (_, client):
        member = Member(client, replica_of("a"))
        await member.register(ttl_s=0.5)
        await member.beat(steps=7, running=3)
        async with Mirror().following(client) as mirror:
            await until_done(lambda: mirror.states.get("a") and mirror.states["a"].steps == 7, "state seen")
            await member.beat(steps=8, draining=True)
            await until_done(lambda: mirror.states["a"].draining, "drain seen")
            assert not mirror.gone


async def test_deregistration_takes_everything_out_before_it_returns(valkey, valkey_url):
    async with registry(valkey_url) as (process, client):
        member = Member(client, replica_of("a"))
        await member.register()
        await member.publish(keys_of(1, 8))
        await client.reserve(MODEL, [_booking(member)], timeout_s=CALL_S)
        await member.deregister()
        await member.deregister()
        assert valkey.keys("a1") == []
        assert await process._store.reservations.loads(MODEL) == {}


async def test_store_away_fails_calls_as_unavailable_and_recovers(valkey):
    async with registry(valkey.url) as (process, client):
        member = Member(client, replica_of("a"))
        await member.register()
        await until_done(process.server.health.healthy, "healthy")
        valkey.kill()
        with pytest.raises(Unavailable):
            await member.beat()
        await until_done(lambda: not process.server.health.healthy(), "degraded")
        valkey.start()
        await until_done(process.server.health.healthy, "healthy again")
        assert await member.beat() == Answer(register_again=True)
        await member.register()
        assert await member.beat() == Answer()


async def test_a_hanging_store_fails_calls_within_their_deadline(valkey):
    async with registry(valkey.url) as (_, client):
        member = Member(client, replica_of("a"))
        await member.register()
        with valkey.stopped(), pytest.raises(Unavailable):
            await client.deregister(member.peer, model=MODEL, timeout_s=0.5)
        assert await member.beat() in {Answer(), Answer(register_again=True)}


async def test_the_registry_starts_without_a_store(valkey):
    valkey.kill()
    async with registry(valkey.url) as (process, client):
        assert not process.server.health.healthy()
        with pytest.raises(Unavailable):
            await Member(client, replica_of("a")).register()
        valkey.start()
        await until_done(process.server.health.healthy, "healthy")
        await Member(client, replica_of("a")).register()


async def test_a_wrong_store_url_is_refused_with_the_forms_that_are_taken():
    with pytest.raises(InvalidArgument, match="unix://"):
        Store("http://somewhere")


async def test_models_with_odd_names_do_not_mix(valkey_url):
    async with registry(valkey_url) as (_, client):
        for name in ("a}b", "{a", "a:b", "модель"):
            replica = replica_of("a", identity=_identity(model=name, model_fingerprint=name))
            await client.register(replica, ttl_s=5.0, timeout_s=CALL_S)


async def test_token_buckets_are_refused_clearly(valkey_url):
    async with registry(valkey_url) as (_, client):
        with pytest.raises(grpc.RpcError) as caught:
            await client._stub.TakeTokens(kv_registry_pb2.TakeTokensRequest(), timeout=CALL_S)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def _booking(member: Member) -> Reservation:
    leg = Leg(peer=member.peer, tokens=10, sequences=1)
    return Reservation(request_id="r", attempt=1, pairs=(Pair(leg),), ttl_s=30.0)
