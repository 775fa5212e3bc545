"""Booked load: legs of requests on replicas, with caps and deadlines. One script a function."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kv_registry.link import RedisLink
from kv_registry.members import KEEP_S, to_ms
from kv_registry.names import Names, member_of, split_member
from kvrelay.directory import Booked, Leg, Pair, Reservation, Settlement

MARK_LINGER_S: Final = 2.0
"""Time that an in-flight mark outlives its prefill: until the replica has published the block, and watchers know."""

US: Final = 1_000_000


@dataclass(slots=True)
class Load:
    """Booked load of an incarnation."""

    prefill_s: float = 0.0
    tokens: int = 0
    sequences: int = 0


class Reservations:
    """Booked load in Redis."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def reserve(self, model: str, reservations: Sequence[Reservation]) -> list[Booked]:
        """Book load; each takes the first of its pairs whose legs fit under their caps, all in one atomic step."""
        asked = json.dumps([_reservation(each) for each in reservations])
        answer = await self._link.script("reserve", Names(model).booking, [to_ms(KEEP_S), asked])
        return [Booked(pair, replica_id.decode()) for pair, replica_id in answer]

    async def settle(self, model: str, settlements: Sequence[Settlement]) -> list[bool]:
        """Renew, move or end legs; False for a reservation that is not there."""
        asked = json.dumps([_settlement(each) for each in settlements])
        keep, linger = to_ms(KEEP_S), to_ms(MARK_LINGER_S)
        answer = await self._link.script("settle", Names(model).booking, [keep, linger, asked])
        return [bool(found) for found in answer]

    async def drop_legs(self, model: str, replica_id: str, incarnation: str) -> None:
        """Take the legs on an incarnation that is gone off the books."""
        await self._link.script("drop_legs", Names(model).booking, [member_of(replica_id, incarnation)])

    async def loads(self, model: str) -> dict[tuple[str, str], Load]:
        """Return the load of each (replica id, incarnation) that has any; what has lapsed is cleared away first."""
        answer = await self._link.script("loads", Names(model).booking)
        loads: dict[tuple[str, str], Load] = {}
        for field, amount in zip(answer[::2], answer[1::2], strict=True):
            load = loads.setdefault(split_member(field[:-2]), Load())
            match field[-2:]:
                case b"/p":
                    load.prefill_s = int(amount) / US
                case b"/t":
                    load.tokens = int(amount)
                case b"/s":
                    load.sequences = int(amount)
        return loads


def _request(reservation: Reservation | Settlement) -> str:
    return f"{reservation.request_id}/{reservation.attempt}"


def _reservation(reservation: Reservation) -> dict[str, Any]:
    return {
        "request": _request(reservation),
        "ttl": to_ms(reservation.ttl_s),
        "key": reservation.inflight_key.hex(),
        "pairs": [_pair(pair) for pair in reservation.pairs],
    }


def _settlement(settlement: Settlement) -> dict[str, Any]:
    pair = {"d": None, "p": None} if settlement.pair is None else _pair(settlement.pair)
    ttl = to_ms(settlement.ttl_s) if settlement.ttl_s else 0
    return pair | {"action": settlement.action.value, "request": _request(settlement), "ttl": ttl}


def _pair(pair: Pair) -> dict[str, Any]:
    return {"d": _leg(pair.decode), "p": None if pair.prefill is None else _leg(pair.prefill)}


def _leg(leg: Leg) -> dict[str, Any]:
    return {
        "m": member_of(leg.peer.replica_id, leg.peer.incarnation),
        "p": round(US * leg.prefill_s),
        "t": leg.tokens,
        "s": leg.sequences,
        "cp": round(US * leg.cap_prefill_s),
        "ct": leg.cap_tokens,
        "cs": leg.cap_sequences,
    }
