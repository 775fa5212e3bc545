"""Booked load, here and in the registry. No request waits for the registry longer than a moment, or fails for it."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, Protocol

from kvrelay.config import CONTROL_DEADLINE_S, RESERVATION_PENDING_TTL_S, RESERVE_DEADLINE_S
from kvrelay.directory import Booked, Leg, Pair, Reservation, SettleAction, Settlement
from kvrelay.errors import KvrelayError
from kvrelay.logs import Logger
from router.booking import BookingKey, Bookings

RENEW_INTERVAL_S: Final = 1.0
"""A third of a reservation's life: two lost renewals do no harm."""

PAUSE_S: Final = 1.0
"""After a call that failed, requests do not ask the registry for this long; each would lose its whole deadline."""

SETTLE_BATCH: Final = 256
"""Settlements in one call: a millisecond or two of the store's time."""

SETTLEMENTS_MAX: Final = 4096
"""Settlements waiting; over it the oldest are dropped, and what they would have ended lapses by itself."""


class RegistryBooking(Protocol):
    """The part of the registry's client that is needed here."""

    async def reserve(self, model: str, reservations: Sequence[Reservation], *, timeout_s: float) -> list[Booked]:
        """Book load."""
        ...

    async def settle(self, model: str, settlements: Sequence[Settlement], *, timeout_s: float) -> list[bool]:
        """Renew, move or end booked legs."""
        ...


class Reservations:
    """Books every attempt locally at once and in the registry as far as that answers."""

    def __init__(self, registry: RegistryBooking, bookings: Bookings, *, model: str, logger: Logger) -> None:
        self._registry = registry
        self._bookings = bookings
        self._model = model
        self._logger = logger
        self._queue: deque[Settlement] = deque(maxlen=SETTLEMENTS_MAX)
        self._wake = asyncio.Event()
        self._paused_until_s = 0.0

    async def reserve(self, key: BookingKey, pairs: Sequence[Pair]) -> int:
        """Book the first of the ranked pairs that fits; return its index.

        When the registry does not answer in time, the first pair is taken by this router's own counts.
        """
        self._bookings.book(key, pairs[0])
        try:
            taken = await self._ask(key, pairs)
        except asyncio.CancelledError:
            self.end(key)
            raise
        if taken:
            self._bookings.book(key, pairs[taken])
        return taken

    def end_prefill(self, key: BookingKey) -> None:
        """The prompt has been read."""
        if self._bookings.end_prefill(key):
            self._settle(SettleAction.END_PREFILL, key)

    def move_prefill(self, key: BookingKey, leg: Leg) -> None:
        """The prompt is read at another replica than was booked."""
        if pair := self._bookings.move_prefill(key, leg):
            self._settle(SettleAction.MOVE_PREFILL, key, pair)

    def end(self, key: BookingKey) -> None:
        """The attempt is over; a second call does nothing."""
        if self._bookings.end(key):
            self._settle(SettleAction.END, key)

    async def run(self) -> None:
        """Tell the registry what has changed, and renew what lives; for ever, as a task."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._settle_all())
            tasks.create_task(self._renew_all())

    async def _ask(self, key: BookingKey, pairs: Sequence[Pair]) -> int:
        if time.monotonic() < self._paused_until_s:
            return 0
        reservation = Reservation(
            request_id=key[0], attempt=key[1], pairs=tuple(pairs), ttl_s=RESERVATION_PENDING_TTL_S
        )
        try:
            booked = (await self._registry.reserve(self._model, [reservation], timeout_s=RESERVE_DEADLINE_S))[0]
        except KvrelayError as error:
            self._pause(error)
            return 0
        # None fits, and yet it must go somewhere: the next renewal enters what was booked here.
        return max(0, booked.pair)

    def _settle(self, action: SettleAction, key: BookingKey, pair: Pair | None = None) -> None:
        self._queue.append(_settlement(action, key, pair))
        self._wake.set()

    async def _settle_all(self) -> None:
        while True:
            await self._wake.wait()
            batch = [self._queue.popleft() for _ in range(min(SETTLE_BATCH, len(self._queue)))]
            if not self._queue:
                self._wake.clear()
            await self._send(batch)

    async def _renew_all(self) -> None:
        while True:
            await asyncio.sleep(RENEW_INTERVAL_S)
            keys = iter([key for key, _ in self._bookings.live()])
            while batch := list(islice(keys, SETTLE_BATCH)):
                await self._renew(batch)

    async def _renew(self, keys: list[BookingKey]) -> None:
        found = await self._send([_settlement(SettleAction.RENEW, key) for key in keys])
        lost = [key for key, there in zip(keys, found, strict=False) if not there]
        # The registry does not know them: it was away when they were made, or has lost its store.
        again = [_settlement(SettleAction.REBOOK, key, pair) for key in lost if (pair := self._bookings.find(key))]
        if again:
            await self._send(again)

    async def _send(self, batch: list[Settlement]) -> list[bool]:
        """Send settlements; on failure they are dropped, since all of them lapse or are renewed by themselves."""
        try:
            return await self._registry.settle(self._model, batch, timeout_s=CONTROL_DEADLINE_S)
        except KvrelayError as error:
            self._pause(error)
            return []

    def _pause(self, error: KvrelayError) -> None:
        now_s = time.monotonic()
        if now_s >= self._paused_until_s:
            self._logger.warning("reservations.local_only", error=type(error).__name__, reason=error.message)
        self._paused_until_s = now_s + PAUSE_S


def _settlement(action: SettleAction, key: BookingKey, pair: Pair | None = None) -> Settlement:
    return Settlement(action=action, request_id=key[0], attempt=key[1], ttl_s=RESERVATION_PENDING_TTL_S, pair=pair)
