"""Names of the keys in Redis. Pure.

All keys of a model share a hash tag, so that in a cluster one script finds all its keys on one node. Nothing lives for
ever: every key has a TTL that the living renew.
"""

from typing import Final
from urllib.parse import quote

MODELS: Final = "kvrelay:{models}"
"""Sorted set: models that have members, by the time (ms) they were last seen to."""


class Names:
    """Names of one model's keys.

    Attributes:
        meta: hash: epoch of this store, numbers of the last event and registration.
        contract: hash: what members must agree on; goes with the last of them.
        due: sorted set: "incarnation/replica id" by the end of its life, ms.
        stream: numbered events.
        states: hash: replica id -> "time in ms:latest beat".
        booking: the five keys of the booked load, in the order that its scripts take them.
    """

    def __init__(self, model: str) -> None:
        # Braces would move the hash tag.
        self._prefix = f"kvrelay:{{{quote(model, safe='')}}}"
        self.meta = self._key("meta")
        self.contract = self._key("contract")
        self.due = self._key("due")
        self.stream = self._key("stream")
        self.states = self._key("states")
        self.booking = tuple(self._key(name) for name in ("reserved", "lapses", "loads", "marks", "mark-lapses"))

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    def replica(self, replica_id: str) -> str:
        """Hash: the entry of a replica's present incarnation, with seq, count and XOR of its block set."""
        return self._key("replica", replica_id)

    def blocks(self, replica_id: str, incarnation: str) -> str:
        """Set: keys of the blocks that an incarnation holds."""
        return self._key("blocks", incarnation, replica_id)

    def staged(self, replica_id: str, incarnation: str, upload: str) -> str:
        """Set: chunks of a snapshot under upload."""
        return self._key("staged", upload, incarnation, replica_id)

    def void(self, replica_id: str, incarnation: str) -> str:
        """Flag: a newer incarnation has taken this one's place."""
        return self._key("void", incarnation, replica_id)


def member_of(replica_id: str, incarnation: str) -> str:
    """Return an incarnation's name in sorted sets and in the booked load; an incarnation has no "/" in it."""
    return f"{incarnation}/{replica_id}"


def split_member(member: bytes) -> tuple[str, str]:
    """Return (replica id, incarnation)."""
    incarnation, _, replica_id = member.decode().partition("/")
    return replica_id, incarnation
