"""Limits of what callers may ask for. Pure."""

import math
from typing import Final

from kvrelay.directory import Reservation, SettleAction, Settlement
from kvrelay.errors import InvalidArgument, Mismatch
from kvrelay.kv.keys import golden_keys
from kvrelay.types import KEY_VERSION, PROTOCOL_MAJOR, ModelIdentity, Peer, Replica

TTL_S_MAX: Final = 600.0
"""Longest life that a member or a reservation may ask for without renewal."""

NAME_CHARACTERS_MAX: Final = 256
"""Longest model alias, replica id, incarnation and request id; names become parts of keys."""

PAIRS_MAX: Final = 64
"""Pairs in one reservation."""

RESERVATIONS_MAX: Final = 1024
"""Reservations or settlements in one call: one script, some tens of ms at most."""

SEQ_MAX: Final = 1 << 53
"""Seqs and counts stay exact in the store's numbers."""

_NEEDS_PAIR: Final = frozenset({SettleAction.MOVE_PREFILL, SettleAction.REBOOK})
_NEEDS_TTL: Final = frozenset({SettleAction.RENEW, SettleAction.REBOOK})


def check_name(field: str, name: str) -> None:
    """Check a model alias or an id.

    Raises:
        InvalidArgument: it is empty, too long, or has control characters.
    """
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        raise InvalidArgument(field, f"{name[:32]!r} is not 1 to {NAME_CHARACTERS_MAX} printable characters")


def check_number(field: str, number: int, most: int) -> None:
    """Check a count.

    Raises:
        InvalidArgument: it is more than `most`.
    """
    if number > most:
        raise InvalidArgument(field, f"{number} is more than {most}")


def check_ttl(ttl_s: float, *, field: str = "ttl_s") -> None:
    """Check a time to live, s.

    Raises:
        InvalidArgument: it is not a number, not above 0, or too long.
    """
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= TTL_S_MAX):
        raise InvalidArgument(field, f"{ttl_s} is not in (0, {TTL_S_MAX:g}]")


def check_peer(peer: Peer) -> None:
    """Check the names of a replica.

    Raises:
        InvalidArgument: names the field.
    """
    check_name("peer.replica_id", peer.replica_id)
    check_name("peer.incarnation", peer.incarnation)
    if "/" in peer.incarnation:
        raise InvalidArgument("peer.incarnation", "must be hex")


def check_replica(replica: Replica) -> None:
    """Check a replica that wants to enter, by itself: whether it agrees with other members is for the store.

    Raises:
        InvalidArgument: a name or its address makes no sense.
        Mismatch: it speaks another protocol, or computes other block keys than this process for what it declares.
    """
    check_peer(replica.peer)
    if not replica.peer.address:
        raise InvalidArgument("replica.peer.address", "must not be empty")
    check_name("replica.identity.model", replica.identity.model)
    check_keys(replica.identity)


def check_keys(identity: ModelIdentity) -> None:
    """Check that a process computes block keys as this one does.

    Raises:
        Mismatch: names the field.
    """
    if identity.protocol_major != PROTOCOL_MAJOR:
        raise Mismatch("protocol_major", PROTOCOL_MAJOR, identity.protocol_major)
    if identity.key_version != KEY_VERSION:
        raise Mismatch("key_version", KEY_VERSION, identity.key_version)
    expected = golden_keys(
        model_fingerprint=identity.model_fingerprint,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        block_tokens=identity.block_tokens,
    )
    if identity.golden_keys != expected:
        raise Mismatch("golden_keys", expected.hex(), identity.golden_keys.hex())


def check_router(pool: ModelIdentity, router: ModelIdentity, fields: tuple[str, ...]) -> None:
    """Check what a router knows of a model against its pool; what is empty or 0 is not known to it.

    Raises:
        Mismatch: names the first field that differs.
    """
    for field in fields:
        expected, got = getattr(pool, field), getattr(router, field)
        if got and got != expected:
            raise Mismatch(field, _shown(expected), _shown(got))


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def check_seq(seq: int, count: int) -> None:
    """Check the place and the size of a block set.

    Raises:
        InvalidArgument: larger than the store counts.
    """
    check_number("seq", seq, SEQ_MAX)
    check_number("count", count, SEQ_MAX)


def check_reservation(reservation: Reservation) -> None:
    """Check a reservation.

    Raises:
        InvalidArgument: names the field.
    """
    check_name("reservations.request_id", reservation.request_id)
    check_number("reservations.pairs", len(reservation.pairs), PAIRS_MAX)
    check_ttl(reservation.ttl_s, field="reservations.ttl_s")


def check_settlement(settlement: Settlement) -> None:
    """Check a settlement.

    Raises:
        InvalidArgument: names the field.
    """
    check_name("settlements.request_id", settlement.request_id)
    if settlement.pair is None and settlement.action in _NEEDS_PAIR:
        raise InvalidArgument("settlements.pair", f"{settlement.action} needs one")
    if settlement.ttl_s or settlement.action in _NEEDS_TTL:
        check_ttl(settlement.ttl_s, field="settlements.ttl_s")
