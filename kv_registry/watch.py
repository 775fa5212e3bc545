"""What one watcher is told: a replay or a snapshot, then events, without a gap, and never older than a set it has."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Final

from kv_registry.blocks import Held
from kv_registry.events import Horizon, Position, Record
from kv_registry.feed import Lost, Tap
from kv_registry.store import Store
from kvrelay.directory import BlockBatch, BlocksSeen, CaughtUp, ReplicaBeat, ReplicaSeen, Reset, Watched, WatchEvent

PART_KEYS: Final = 8192
"""Keys in one event of a snapshot: 128 KiB."""


class _Gap(Exception):
    """Events are missing between where the watcher is and what came."""


class Watcher:
    """Follows one model for one caller.

    A watcher reads the tail's position first, then the sets, then goes on from that position: events that the sets
    already show are passed over (`Horizon`), so each set's seq, count and XOR stay as its replica told them.
    """

    def __init__(self, store: Store, tap: Tap, model: str, position: str) -> None:
        self._store = store
        self._tap = tap
        self._model = model
        self._position = Position.parse(position)
        self._horizon = Horizon()

    async def events(self) -> AsyncGenerator[Watched, None]:
        """Yield events for ever; positions are empty until `CaughtUp`.

        Raises:
            Unavailable: the store does not answer and there is nothing to go on from.
        """
        while True:
            async with aclosing(self._catch_up()) as past:
                async for watched in past:
                    yield watched
            async with aclosing(self._go_on()) as live:
                async for watched in live:
                    yield watched

    async def _catch_up(self) -> AsyncGenerator[Watched, None]:
        while True:
            try:
                async for event in self._replay():
                    yield self._watched(event)
                break
            except _Gap:
                self._position = None
                yield Watched("", Reset())
                async for event in self._load():
                    yield Watched("", event)
        yield self._watched(CaughtUp())

    async def _replay(self) -> AsyncIterator[WatchEvent]:
        tail = await self._store.events.tail(self._model)
        position = self._position
        if position is None or position.store != tail.store or position.number > tail.number:
            raise _Gap
        while self._number < tail.number:
            records = await self._store.events.read(self._model, self._number)
            if not records:
                raise _Gap
            for record in records:
                async for event in self._step(record):
                    yield event

    async def _load(self) -> AsyncIterator[WatchEvent]:
        tail = await self._store.events.tail(self._model)
        self._horizon = Horizon()
        for replica_id, incarnation in await self._store.members.members(self._model):
            held = await self._store.blocks.read(self._model, replica_id, incarnation)
            if held is not None:
                self._horizon.know(replica_id, held.event)
                yield ReplicaSeen(held.replica)
                for event in _set_events(held):
                    yield event
                if held.state is not None:
                    yield ReplicaBeat(held.replica.peer, held.state)
        self._position = tail

    async def _go_on(self) -> AsyncGenerator[Watched, None]:
        while True:
            item = await self._tap.get()
            if isinstance(item, Lost):
                return
            if isinstance(item, ReplicaBeat):
                yield self._watched(item)
            elif item.number > self._number:
                try:
                    async for event in self._step(item):
                        yield self._watched(event)
                except _Gap:
                    return

    async def _step(self, record: Record) -> AsyncIterator[WatchEvent]:
        assert self._position is not None
        if record.number != self._position.number + 1:
            raise _Gap
        self._position = self._position.at(record.number)
        if self._horizon.has_passed(record):
            return
        if record.kind == "snapshot":
            async for event in self._fetch_set(record):
                yield event
        else:
            yield record.event()

    async def _fetch_set(self, record: Record) -> AsyncIterator[WatchEvent]:
        """Tell a replica's new set: as it is by now, so older events that follow are passed over."""
        held = await self._store.blocks.read(self._model, record.replica_id, record.incarnation)
        if held is None or held.replica.epoch != record.epoch:
            # It is gone or has registered again, as a later event will tell. Until then its changes have no base.
            self._horizon.mute(record.replica_id)
            return
        self._horizon.know(record.replica_id, held.event)
        for event in _set_events(held):
            yield event

    @property
    def _number(self) -> int:
        return self._position.number if self._position else 0

    def _watched(self, event: WatchEvent) -> Watched:
        return Watched(self._position.text if self._position else "", event)


def _set_events(held: Held) -> Iterator[BlocksSeen]:
    """Give a whole set in parts; the last one tells count and XOR."""
    parts = range(0, max(1, len(held.keys)), PART_KEYS)
    for start in parts:
        last = start == parts[-1]
        yield BlocksSeen(
            held.replica.peer,
            BlockBatch(
                seq=held.seq,
                added=tuple(held.keys[start : start + PART_KEYS]),
                cleared=start == 0,
                count=len(held.keys) if last else 0,
                xor=held.xor if last else b"",
            ),
        )
