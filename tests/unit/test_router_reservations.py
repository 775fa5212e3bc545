import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from kvrelay.directory import Booked, Leg, Pair, Reservation, SettleAction, Settlement
from kvrelay.errors import Unavailable
from kvrelay.logs import get_logger
from kvrelay.types import Peer
from router import reservations as module
from router.booking import Bookings
from router.policy.values import Load
from router.reservations import Reservations

A, B = (Peer(name, "i", f"{name}:1") for name in "ab")
PAIRS = [Pair(Leg(peer=A, sequences=1)), Pair(Leg(peer=B, sequences=1))]
WAIT_S = 10.0


class Registry:
    """Answers as told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.pair = 0
        self.away = False
        self.known = True
        self.asked = 0
        self.settled: list[Settlement] = []

    async def reserve(self, model: str, reservations: Sequence[Reservation], *, timeout_s: float) -> list[Booked]:
        assert (model, timeout_s) == ("m", module.RESERVE_DEADLINE_S)
        self.asked += 1
        if self.away:
            raise Unavailable("away")
        return [Booked(self.pair) for _ in reservations]

    async def settle(self, model: str, settlements: Sequence[Settlement], *, timeout_s: float) -> list[bool]:
        assert model == "m"
        assert timeout_s > 0
        if self.away:
            raise Unavailable("away")
        self.settled += settlements
        return [self.known or each.action is SettleAction.REBOOK for each in settlements]

    def actions(self, action: SettleAction) -> list[Settlement]:
        return [each for each in self.settled if each.action is action]


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(module, "RENEW_INTERVAL_S", 0.01)


def made() -> tuple[Registry, Bookings, Reservations]:
    registry, bookings = Registry(), Bookings()
    return registry, bookings, Reservations(registry, bookings, model="m", logger=get_logger("test"))


@asynccontextmanager
async def running(reservations: Reservations):
    task = asyncio.create_task(reservations.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the fake has no event for each thing waited for
            await asyncio.sleep(0)


async def test_the_pair_that_the_registry_takes_is_the_one_that_is_booked():
    registry, bookings, reservations = made()
    registry.pair = 1
    assert await reservations.reserve(("r", 0), PAIRS) == 1
    assert (bookings.load(A), bookings.load(B)) == (Load(), Load(sequences=1))


async def test_without_the_registry_the_first_pair_is_booked_and_nobody_waits_again_for_a_while():
    registry, bookings, reservations = made()
    registry.away = True
    assert await reservations.reserve(("r", 0), PAIRS) == 0
    assert await reservations.reserve(("s", 0), PAIRS) == 0
    assert registry.asked == 1
    assert bookings.load(A) == Load(sequences=2)


async def test_what_fits_nowhere_is_booked_all_the_same():
    registry, bookings, reservations = made()
    registry.pair = -1
    assert await reservations.reserve(("r", 0), PAIRS) == 0
    assert bookings.load(A) == Load(sequences=1)


async def test_ends_are_told_once_and_live_bookings_renewed():
    registry, _, reservations = made()
    async with running(reservations):
        await reservations.reserve(("r", 0), PAIRS)
        await reservations.reserve(("s", 0), PAIRS)
        await until(lambda: len(registry.actions(SettleAction.RENEW)) >= 2)
        reservations.end(("r", 0))
        reservations.end(("r", 0))
        await until(lambda: registry.actions(SettleAction.END))
        seen = len(registry.actions(SettleAction.RENEW))
        await until(lambda: len(registry.actions(SettleAction.RENEW)) > seen + 2)
    assert [each.request_id for each in registry.actions(SettleAction.END)] == ["r"]
    assert {each.request_id for each in registry.actions(SettleAction.RENEW)[seen + 1 :]} == {"s"}


async def test_a_registry_that_lost_its_store_gets_live_legs_again_as_they_stand():
    registry, _, reservations = made()
    await reservations.reserve(("r", 0), [Pair(Leg(peer=A, sequences=1), Leg(peer=B, prefill_s=1.0))])
    reservations.end_prefill(("r", 0))
    registry.known = False
    async with running(reservations):
        await until(lambda: registry.actions(SettleAction.REBOOK))
    assert registry.actions(SettleAction.REBOOK)[0].pair == Pair(Leg(peer=A, sequences=1))


async def test_settlements_that_cannot_be_told_are_bounded():
    registry, _, reservations = made()
    registry.away = True
    await reservations.reserve(("r", 0), PAIRS)
    for number in range(module.SETTLEMENTS_MAX + 10):
        reservations.move_prefill(("r", 0), Leg(peer=B, prefill_s=float(number)))
    registry.away = False
    async with running(reservations):
        last = float(module.SETTLEMENTS_MAX + 9)
        await until(
            lambda: any(each.pair.prefill.prefill_s == last for each in registry.actions(SettleAction.MOVE_PREFILL))
        )
    assert len(registry.actions(SettleAction.MOVE_PREFILL)) == module.SETTLEMENTS_MAX


async def test_a_cancelled_request_leaves_nothing_booked():
    registry, bookings, reservations = made()
    called = asyncio.Event()

    async def hang(*_args: object, **_kwargs: object) -> list[Booked]:
        called.set()
        await asyncio.Event().wait()
        return []

    registry.reserve = hang
    task = asyncio.create_task(reservations.reserve(("r", 0), PAIRS))
    async with asyncio.timeout(WAIT_S):
        await called.wait()
    assert bookings.load(A) == Load(sequences=1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(bookings) == 0
