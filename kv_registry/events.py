"""Reading a model's event stream: positions, records, and what of them a reader has already seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from kv_registry.link import RedisLink
from kv_registry.names import Names
from kvrelay.directory import BlockBatch, BlocksSeen, ReplicaBeat, ReplicaGone, ReplicaSeen, WatchEvent
from kvrelay.rpc import registry_convert
from kvrelay.types import Peer, split_keys

READ_MAX: Final = 256
"""Records read at once: bounds memory at 16 MiB even when every one is as large as can be."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader has come: epoch of the store, empty before its first member; number of the last event."""

    store: str = ""
    number: int = 0

    @property
    def text(self) -> str:
        """The position as watchers keep it."""
        return f"{self.store}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the position; None when it is not one."""
        store, _, number = text.rpartition(":")
        return cls(store, int(number)) if store and number.isascii() and number.isdigit() else None

    def at(self, number: int) -> "Position":
        """Return the position in the same store after event `number`."""
        return Position(self.store, number)


@dataclass(frozen=True, slots=True)
class Record:
    """One event as the store keeps it."""

    number: int
    fields: Mapping[bytes, bytes]

    @property
    def kind(self) -> str:
        """One of replica, gone, beat, blocks, snapshot."""
        return self.fields[b"kind"].decode()

    @property
    def replica_id(self) -> str:
        """Whom it is about."""
        return self.fields[b"id"].decode()

    @property
    def incarnation(self) -> str:
        """Which start of it."""
        return self.fields[b"incarnation"].decode()

    @property
    def epoch(self) -> int:
        """Which registration of it."""
        return int(self.fields[b"epoch"])

    def event(self) -> WatchEvent:
        """Return what watchers are told. Not for "snapshot": its keys lie in the set."""
        match self.kind:
            case "replica":
                return ReplicaSeen(registry_convert.unpack_replica(self.fields[b"entry"], epoch=self.epoch))
            case "gone":
                return ReplicaGone(self._peer(), self.fields[b"reason"].decode())
            case "beat":
                return self.beat()
            case "blocks":
                return BlocksSeen(self._peer(), self._batch())
            case kind:
                raise ValueError(kind)

    def beat(self) -> ReplicaBeat:
        """Return the state in a "beat"."""
        return registry_convert.unpack_beat(self.fields[b"beat"])

    def _peer(self) -> Peer:
        packed = self.fields[b"peer"]
        # The entry may have lapsed before the replica was taken out, and its address with it.
        return registry_convert.unpack_peer(packed) if packed else Peer(self.replica_id, self.incarnation, "")

    def _batch(self) -> BlockBatch:
        return BlockBatch(
            seq=int(self.fields[b"seq"]),
            added=tuple(split_keys(self.fields.get(b"added", b""))),
            removed=tuple(split_keys(self.fields.get(b"removed", b""))),
            cleared=self.fields[b"cleared"] == b"1",
            count=int(self.fields[b"count"]),
            xor=self.fields[b"xor"],
        )


class Horizon:
    """What a reader knows of each replica from sets that it read whole, so that older events do not undo it."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._muted: set[str] = set()

    def know(self, replica_id: str, number: int) -> None:
        """Note that the effect of a replica's events up to `number` is known."""
        self._known[replica_id] = number

    def mute(self, replica_id: str) -> None:
        """Note that a replica's set is not known and cannot be had: its changes mean nothing until it enters again."""
        self._muted.add(replica_id)

    def has_passed(self, record: Record) -> bool:
        """Return whether a record tells nothing new, or nothing that the reader could use."""
        if record.number <= self._known.get(record.replica_id, 0):
            return True
        if record.kind in {"replica", "gone"}:
            self._muted.discard(record.replica_id)
            self._known.pop(record.replica_id, None)
        return record.kind in {"blocks", "snapshot"} and record.replica_id in self._muted


class Events:
    """A model's event stream in Redis."""

    def __init__(self, link: RedisLink, waiting_link: RedisLink) -> None:
        self._link = link
        self._waiting_link = waiting_link

    async def tail(self, model: str) -> Position:
        """Return the position after the last event; the empty one when the model never had a member."""
        store, number = await self._link.command("HMGET", Names(model).meta, "epoch", "event")
        return Position(store.decode(), int(number)) if store and number else Position()

    async def read(self, model: str, after: int) -> list[Record]:
        """Return up to `READ_MAX` records after a number."""
        stream = Names(model).stream
        return _records(await self._link.command("XRANGE", stream, f"({after}-1", "+", "COUNT", READ_MAX))

    async def wait(self, model: str, after: int, *, timeout_s: float) -> list[Record]:
        """Return up to `READ_MAX` records after a number, as soon as there is one; none after `timeout_s`."""
        stream, wait_ms = Names(model).stream, round(1000 * timeout_s)
        answer = await self._waiting_link.command(
            "XREAD", "COUNT", READ_MAX, "BLOCK", wait_ms, "STREAMS", stream, f"{after}-1"
        )
        return _records(answer[0][1]) if answer else []

    async def states(self, model: str) -> dict[bytes, bytes]:
        """Return each replica's latest state, as `beat_of` reads it."""
        states: dict[bytes, bytes] = await self._link.command("HGETALL", Names(model).states)
        return states


def beat_of(kept: bytes) -> ReplicaBeat:
    """Return the beat of a kept state."""
    return registry_convert.unpack_beat(kept.partition(b":")[2])


def _records(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Record]:
    return [Record(int(entry_id.partition(b"-")[0]), fields) for entry_id, fields in entries]
