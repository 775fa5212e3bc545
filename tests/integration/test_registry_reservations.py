"""Booked load: caps hold under concurrency, what has lapsed never counts, and nothing is left over."""

import asyncio
import random
import time
from collections import Counter

import pytest
from support.registry import CALL_S, MODEL, Member, keys_of, registry, replica_of, until_done

from kv_registry.reservations import Load
from kvrelay.directory import Booked, Leg, Pair, Reservation, SettleAction, Settlement
from kvrelay.errors import InvalidArgument

A, B, C = (replica_of(name).peer for name in "abc")
KEY = bytes(range(16))


class Books:
    """Reserves and settles, one at a time, and looks at the loads."""

    def __init__(self, client, store) -> None:
        self.client = client
        self.store = store

    async def reserve(self, *pairs, request_id="r", attempt=1, ttl_s=30.0, key=b"") -> Booked:
        asked = Reservation(request_id=request_id, attempt=attempt, pairs=pairs, ttl_s=ttl_s, inflight_key=key)
        (booked,) = await self.client.reserve(MODEL, [asked], timeout_s=CALL_S)
        return booked

    async def settle(self, action, *, request_id="r", attempt=1, ttl_s=0.0, pair=None) -> bool:
        asked = Settlement(action=action, request_id=request_id, attempt=attempt, ttl_s=ttl_s, pair=pair)
        (found,) = await self.client.settle(MODEL, [asked], timeout_s=CALL_S)
        return found

    async def loads(self) -> dict[str, Load]:
        loads = await self.store.reservations.loads(MODEL)
        return {replica_id: load for (replica_id, _), load in loads.items()}

    async def is_inflight_at(self, key: bytes) -> str:
        """Return where a key is being computed, through a reservation that leaves nothing behind."""
        probe = await self.reserve(request_id="probe", key=key)
        assert probe.pair == -1
        return probe.inflight_replica_id


@pytest.fixture
async def books(valkey_url):
    async with registry(valkey_url) as (process, client):
        yield Books(client, process._store)


def decode(peer=A, tokens=100, sequences=1, **caps) -> Leg:
    return Leg(peer=peer, tokens=tokens, sequences=sequences, **caps)


def prefill(peer=B, prefill_s=1.0, cap_prefill_s=0.0) -> Leg:
    return Leg(peer=peer, prefill_s=prefill_s, cap_prefill_s=cap_prefill_s)


async def test_the_first_pair_that_fits_is_booked(books):
    full = decode(A, cap_tokens=99)
    assert await books.reserve(Pair(full), Pair(decode(C), prefill(B, 2.5)), Pair(decode(A))) == Booked(1)
    assert await books.loads() == {"b": Load(2.5, 0, 0), "c": Load(0.0, 100, 1)}


@pytest.mark.parametrize(
    "full",
    [
        Pair(decode(cap_tokens=199)),
        Pair(decode(cap_sequences=1)),
        Pair(Leg(peer=A, prefill_s=0.5, cap_prefill_s=0.7)),
        Pair(decode(C), prefill(B, 1.0, cap_prefill_s=1.5)),
        Pair(decode(B, cap_prefill_s=1.5), prefill(B, 1.0)),
    ],
)
async def test_each_cap_counts_what_is_booked_and_the_new_leg_itself(books, full):
    assert await books.reserve(Pair(Leg(peer=A, prefill_s=0.3, tokens=100, sequences=1), prefill(B))) == Booked(0)
    assert await books.reserve(full, request_id="next") == Booked(-1)


async def test_a_cap_that_is_just_met_is_not_passed(books):
    pair = Pair(decode(A, tokens=100, sequences=1, cap_tokens=200, cap_sequences=2), prefill(B, 0.1, 0.2))
    answers = [await books.reserve(pair, request_id=str(number)) for number in range(3)]
    assert [answer.pair for answer in answers] == [0, 0, -1]


async def test_nothing_is_booked_when_no_pair_fits(books):
    assert await books.reserve(Pair(decode(cap_sequences=1, sequences=2))) == Booked(-1)
    assert await books.loads() == {}
    assert not await books.settle(SettleAction.END)


async def test_concurrent_reservations_never_pass_the_caps(books):
    caps = {"cap_tokens": 1000, "cap_sequences": 8}
    pairs = (Pair(decode(A, **caps), prefill(B, 0.5, 3.0)), Pair(decode(C, **caps), prefill(B, 0.5, 6.0)))
    answers = await asyncio.gather(*(books.reserve(*pairs, request_id=f"r{number}") for number in range(60)))
    assert Counter(answer.pair for answer in answers) == {0: 6, 1: 6, -1: 48}
    assert await books.loads() == {
        "a": Load(0.0, 600, 6),
        "b": Load(6.0, 0, 0),
        "c": Load(0.0, 600, 6),
    }


async def test_asking_again_for_the_same_attempt_books_it_once(books):
    for _ in range(3):
        assert await books.reserve(Pair(decode(A, cap_sequences=1), prefill(B))) == Booked(0)
    assert await books.loads() == {"a": Load(0.0, 100, 1), "b": Load(1.0, 0, 0)}
    assert await books.reserve(Pair(decode(C)), attempt=2) == Booked(0)


async def test_legs_end_one_after_the_other_and_leave_nothing(books, valkey):
    await books.reserve(Pair(decode(A), prefill(B)), key=KEY)
    assert await books.settle(SettleAction.END_PREFILL)
    assert await books.loads() == {"a": Load(0.0, 100, 1)}
    assert await books.settle(SettleAction.END)
    assert await books.loads() == {}
    assert not await books.settle(SettleAction.END)
    assert valkey.keys("reserved") + valkey.keys("loads") + valkey.keys("marks") == []


async def test_prefill_at_the_decode_replica_ends_with_end_prefill_too(books):
    await books.reserve(Pair(Leg(peer=A, prefill_s=2.0, tokens=10, sequences=1)))
    assert await books.loads() == {"a": Load(2.0, 10, 1)}
    await books.settle(SettleAction.END_PREFILL)
    assert await books.loads() == {"a": Load(0.0, 10, 1)}


async def test_lapsed_reservations_free_their_load_and_renewed_ones_live_on(books):
    full = Pair(decode(A, cap_sequences=2), prefill(B, 1.0, 2.0))
    for name in ("kept", "lost"):
        assert await books.reserve(full, request_id=name, ttl_s=0.3) == Booked(0)
    assert await books.settle(SettleAction.RENEW, request_id="kept", ttl_s=30.0)
    assert await books.reserve(full, request_id="next") == Booked(-1)
    began_s = time.monotonic()
    while (await books.reserve(full, request_id="next")).pair != 0:
        assert time.monotonic() - began_s < CALL_S
    assert not await books.settle(SettleAction.RENEW, request_id="lost", ttl_s=30.0)
    assert await books.loads() == {"a": Load(0.0, 200, 2), "b": Load(2.0, 0, 0)}


async def test_lapsed_reservations_are_cleared_away_even_when_nobody_asks(books, valkey):
    await books.reserve(Pair(decode(A), prefill(B)), key=KEY, ttl_s=0.05)
    member = Member(books.client, replica_of("a"))
    await member.register()
    await until_done(lambda: not valkey.keys("loads") and not valkey.keys("marks"), "cleared away")


async def test_moving_the_prefill_leg_moves_its_load_and_its_mark(books):
    await books.reserve(Pair(decode(A), prefill(B, 1.0)), key=KEY)
    assert await books.settle(SettleAction.MOVE_PREFILL, pair=Pair(decode(A), prefill(C, 3.0)))
    assert await books.loads() == {"a": Load(0.0, 100, 1), "c": Load(3.0, 0, 0)}
    assert await books.is_inflight_at(KEY) == "c"
    await books.settle(SettleAction.MOVE_PREFILL, pair=Pair(Leg(peer=A, prefill_s=2.0)))
    assert await books.loads() == {"a": Load(2.0, 100, 1)}
    assert await books.is_inflight_at(KEY) == "a"


async def test_rebooking_ignores_caps_and_needs_no_earlier_reservation(books):
    pair = Pair(decode(A, cap_sequences=1, sequences=3), prefill(B, 1.0, 0.5))
    for _ in range(2):
        await books.settle(SettleAction.REBOOK, ttl_s=30.0, pair=pair)
    assert await books.loads() == {"a": Load(0.0, 100, 3), "b": Load(1.0, 0, 0)}
    assert await books.settle(SettleAction.END)
    assert await books.loads() == {}


async def test_the_replica_that_computes_a_key_is_told_to_those_who_ask_next(books):
    first = await books.reserve(Pair(decode(A), prefill(B)), request_id="first", key=KEY)
    second = await books.reserve(Pair(decode(A), prefill(C)), request_id="second", key=KEY)
    assert (first, second) == (Booked(0), Booked(0, "b"))
    assert await books.is_inflight_at(KEY) == "b"


@pytest.mark.parametrize("action", [SettleAction.END, SettleAction.CLEAR_INFLIGHT])
async def test_a_failed_request_leaves_no_mark(books, action):
    await books.reserve(Pair(decode(A), prefill(B)), key=KEY)
    await books.settle(action)
    assert await books.is_inflight_at(KEY) == ""


async def test_only_its_own_request_erases_a_mark(books):
    await books.reserve(Pair(decode(A), prefill(B)), request_id="first", key=KEY)
    await books.reserve(Pair(decode(A), prefill(C)), request_id="second", key=KEY)
    await books.settle(SettleAction.END, request_id="second")
    assert await books.is_inflight_at(KEY) == "b"


async def test_a_mark_outlives_its_prefill_until_the_block_is_published_and_no_longer(books):
    await books.reserve(Pair(decode(A), prefill(B)), key=KEY)
    await books.settle(SettleAction.END_PREFILL)
    assert await books.is_inflight_at(KEY) == "b"
    began_s = time.monotonic()
    while await books.is_inflight_at(KEY):
        await books.settle(SettleAction.RENEW, ttl_s=30.0)
        assert time.monotonic() - began_s < CALL_S


async def test_a_replica_that_goes_loses_its_legs_and_the_others_keep_theirs(books):
    gone, stays = Member(books.client, replica_of("b")), Member(books.client, replica_of("a"))
    await gone.register()
    await stays.register()
    await books.reserve(Pair(decode(A), prefill(B)), request_id="one", key=KEY)
    await books.reserve(Pair(decode(B), prefill(A)), request_id="two")
    await gone.deregister()
    assert await books.loads() == {"a": Load(1.0, 100, 1)}
    assert await books.is_inflight_at(KEY) == ""
    # Ending what was lost with it takes nothing off those who came later.
    await gone.register()
    await books.reserve(Pair(decode(B), prefill(B)), request_id="three")
    assert await books.settle(SettleAction.END, request_id="one")
    assert await books.settle(SettleAction.END, request_id="two")
    assert await books.loads() == {"b": Load(1.0, 100, 1)}


async def test_many_reservations_travel_in_one_call_and_see_each_other(books):
    pair = Pair(decode(A, cap_sequences=10))
    asked = [Reservation(request_id=f"r{n}", attempt=1, pairs=(pair,), ttl_s=30.0) for n in range(32)]
    booked = await books.client.reserve(MODEL, asked, timeout_s=CALL_S)
    assert [each.pair for each in booked] == [0] * 10 + [-1] * 22
    ends = [Settlement(action=SettleAction.END, request_id=f"r{n}", attempt=1) for n in range(32)]
    assert await books.client.settle(MODEL, ends, timeout_s=CALL_S) == [True] * 10 + [False] * 22
    assert await books.loads() == {}


async def test_random_histories_end_with_nothing_booked(books, valkey):
    source = random.Random(7)
    peers, live = (A, B, C), set()
    for step in range(150):
        name = f"r{source.randrange(20)}"
        pair = Pair(
            decode(source.choice(peers), source.randrange(1000), prefill_s=source.random()),
            source.choice([None, prefill(source.choice(peers), source.random())]),
        )
        action = source.choice(["reserve", *SettleAction])
        if action == "reserve":
            await books.reserve(pair, request_id=name, key=source.choice([b"", KEY, keys_of(step, 1)[0]]))
            live.add(name)
        else:
            found = await books.settle(action, request_id=name, ttl_s=30.0, pair=pair)
            assert found == (name in live or action == SettleAction.REBOOK)
            live = (live | {name}) if action == SettleAction.REBOOK else live
            live -= {name} if action == SettleAction.END else set()
    for name in live:
        assert await books.settle(SettleAction.END, request_id=name)
    assert await books.loads() == {}
    assert valkey.keys("marks") + valkey.keys("reserved") + valkey.keys("lapses") == []


@pytest.mark.parametrize(
    ("pair", "field"),
    [
        (Pair(Leg(peer=A, prefill_s=float("nan"))), "reservations.pairs.decode.prefill_s"),
        (Pair(Leg(peer=A, prefill_s=-1.0)), "reservations.pairs.decode.prefill_s"),
        (Pair(decode(A), Leg(peer=B, cap_prefill_s=float("inf"))), "reservations.pairs.prefill.cap_prefill_s"),
        (Pair(decode(A, tokens=2**50)), "reservations.pairs.decode.tokens"),
    ],
)
async def test_loads_that_make_no_sense_are_refused(books, pair, field):
    with pytest.raises(InvalidArgument) as caught:
        await books.reserve(pair)
    assert caught.value.field == field


async def test_time_of_a_reservation_among_8_pairs(books):
    pairs = [Pair(decode(A, cap_tokens=1), prefill(B, 1.0, 0.1))] * 7 + [Pair(decode(A), prefill(B))]
    times = []
    for number in range(100):
        began_s = time.monotonic()
        assert (await books.reserve(*pairs, request_id=f"r{number}", key=KEY)).pair == 7
        times.append(time.monotonic() - began_s)
    times.sort()
    print(f"reserve, 8 pairs, gRPC + Redis: p50 {1000 * times[50]:.2f} ms, p99 {1000 * times[98]:.2f} ms")
