"""What this router has booked where: the load that its decisions see. Pure.

Load counts from dispatch and is given back exactly once, whatever becomes of the request.
"""

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvrelay.directory import Leg, Pair
from kvrelay.types import Peer
from router.policy.values import Load

BookingKey: TypeAlias = tuple[str, int]
"""Request id and attempt."""


@dataclass(slots=True)
class _Account:
    """One replica's load: booked here, its peaks in this heartbeat interval and the one before, others' load."""

    booked: Load = field(default_factory=Load)
    legs: int = 0
    peak: Load = field(default_factory=Load)
    peak_before: Load = field(default_factory=Load)
    others: Load = field(default_factory=Load)


class Bookings:
    """Booked legs by request and attempt, and their sums by replica."""

    def __init__(self) -> None:
        self._pairs: dict[BookingKey, Pair] = {}
        self._accounts: dict[tuple[str, str], _Account] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def live(self) -> list[tuple[BookingKey, Pair]]:
        """Return all that is booked, as it stands now."""
        return list(self._pairs.items())

    def find(self, key: BookingKey) -> Pair | None:
        """Return what is booked for an attempt."""
        return self._pairs.get(key)

    def book(self, key: BookingKey, pair: Pair) -> None:
        """Book a pair; another one that the attempt had is given back."""
        self.end(key)
        self._pairs[key] = pair
        self._count(pair, 1)

    def end_prefill(self, key: BookingKey) -> bool:
        """Give back the prefill work, wherever it was booked; return whether there was any."""
        pair = self._pairs.get(key)
        if pair is None or (pair.prefill is None and not pair.decode.prefill_s):
            return False
        self.book(key, Pair(replace(pair.decode, prefill_s=0.0)))
        return True

    def move_prefill(self, key: BookingKey, leg: Leg) -> Pair | None:
        """Book the prefill work at another replica; return the pair as it is then, None when nothing is booked."""
        pair = self._pairs.get(key)
        if pair is None:
            return None
        moved = Pair(replace(pair.decode, prefill_s=0.0), leg)
        self.book(key, moved)
        return moved

    def end(self, key: BookingKey) -> bool:
        """Give everything back; return whether anything was booked."""
        pair = self._pairs.pop(key, None)
        if pair is None:
            return False
        self._count(pair, -1)
        return True

    def load(self, peer: Peer) -> Load:
        """Return a replica's load: booked here, and what others are known to have there."""
        account = self._accounts.get(_name(peer))
        return account.booked + account.others if account else Load()

    def told(self, peer: Peer, reported: Load) -> None:
        """Learn others' load from what a replica reports: what exceeds the most that was booked here meanwhile.

        A report is older than the bookings of now, so it is compared with the peak of two heartbeat intervals. It
        never lowers what is booked, and is never added to it.
        """
        account = self._accounts.setdefault(_name(peer), _Account())
        own = _most(account.peak, account.peak_before)
        account.others = Load(
            prefill_s=max(0.0, reported.prefill_s - own.prefill_s),
            tokens=max(0, reported.tokens - own.tokens),
            sequences=max(0, reported.sequences - own.sequences),
        )
        account.peak_before, account.peak = account.peak, account.booked

    def gone(self, peer: Peer) -> None:
        """Forget what a replica reported; what is booked there goes when its requests end."""
        account = self._accounts.get(_name(peer))
        if account:
            account.others = account.peak = account.peak_before = Load()
            self._tidy(peer, account)

    def _count(self, pair: Pair, sign: int) -> None:
        for leg in (pair.decode, pair.prefill):
            if leg is None:
                continue
            account = self._accounts.setdefault(_name(leg.peer), _Account())
            account.legs += sign
            account.booked = _changed(account.booked, leg, sign) if account.legs else Load()
            account.peak = _most(account.peak, account.booked)
            self._tidy(leg.peer, account)

    def _tidy(self, peer: Peer, account: _Account) -> None:
        if not account.legs and account.others == account.peak == account.peak_before == Load():
            self._accounts.pop(_name(peer), None)


def _name(peer: Peer) -> tuple[str, str]:
    return peer.replica_id, peer.incarnation


def _changed(load: Load, leg: Leg, sign: int) -> Load:
    return Load(
        prefill_s=max(0.0, load.prefill_s + sign * leg.prefill_s),
        tokens=load.tokens + sign * leg.tokens,
        sequences=load.sequences + sign * leg.sequences,
    )


def _most(one: Load, other: Load) -> Load:
    return Load(
        prefill_s=max(one.prefill_s, other.prefill_s),
        tokens=max(one.tokens, other.tokens),
        sequences=max(one.sequences, other.sequences),
    )
