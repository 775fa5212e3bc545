"""One reader a model: waits for events once and hands them to all watchers of this process, over bounded queues."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

from kv_registry.events import Events, Position, Record, beat_of
from kv_registry.store import FEEDS_MAX
from kvrelay.directory import ReplicaBeat
from kvrelay.errors import KvrelayError, ResourceExhausted
from kvrelay.logs import Logger

BEAT_INTERVAL_S: Final = 0.5
"""Time between looks at the members' states: the default heartbeat interval, so that watchers see nearly each."""

MIN_WAIT_S: Final = 0.005
"""The store takes whole ms, and 0 as "for ever"."""

RETRY_INTERVAL_S: Final = 0.5
"""Pause before the store is tried again."""

TAP_ITEMS_MAX: Final = 1024
"""Items that may wait for one watcher; past it the watcher falls back on the stream, or a snapshot."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Something was missed: catch up from the stream, or from the sets."""


Item: TypeAlias = Record | ReplicaBeat | Lost


class Tap:
    """One watcher's queue. When it is full its content gives way to one `Lost`."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque(maxlen=TAP_ITEMS_MAX)
        self._filled = asyncio.Event()

    def put(self, item: Item) -> None:
        """Add an item; never waits."""
        if len(self._items) == TAP_ITEMS_MAX:
            self._items.clear()
            item = Lost()
        self._items.append(item)
        self._filled.set()

    async def get(self) -> Item:
        """Take the next item; waits for ever, as watchers do."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        return self._items.popleft()


class Feed:
    """Follows one model while it has watchers."""

    def __init__(self, events: Events, model: str, logger: Logger) -> None:
        self._events = events
        self._model = model
        self._taps: set[Tap] = set()
        self._position = Position()
        self._behind: int | None = None
        self._told: dict[bytes, bytes] = {}
        self._logger = logger.bind(model=model)

    @contextmanager
    def tap(self) -> Iterator[Tap]:
        """Give a queue of what comes from now on."""
        tap = Tap()
        self._taps.add(tap)
        try:
            yield tap
        finally:
            self._taps.discard(tap)

    @property
    def watched(self) -> bool:
        """Whether it has watchers."""
        return bool(self._taps)

    async def run(self) -> NoReturn:
        """Follow for ever; while the store is away, keep the watchers and try again."""
        while True:
            try:
                await self._follow()
            except KvrelayError as error:
                self._logger.warning("feed.interrupted", reason=error.message)
            except Exception:
                self._logger.exception("feed.crashed")
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _follow(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            await self._look()
            look_at_s = loop.time() + BEAT_INTERVAL_S
            while (wait_s := look_at_s - loop.time()) > MIN_WAIT_S:
                self._take(await self._events.wait(self._model, self._position.number, timeout_s=wait_s))

    def _take(self, records: list[Record]) -> None:
        for record in records:
            if record.number != self._position.number + 1:
                self._tell(Lost())
            else:
                self._tell(record)
            self._position = self._position.at(record.number)

    async def _look(self) -> None:
        """Tell new states, and see whether the store is still the one that is followed."""
        tail = await self._events.tail(self._model)
        never_came = self._behind is not None and self._position.number < self._behind
        if tail.store != self._position.store or tail.number < self._position.number or never_came:
            self._position = tail
            self._told = {}
            self._tell(Lost())
        self._behind = tail.number if tail.number > self._position.number else None
        self._tell_beats(await self._events.states(self._model))

    def _tell_beats(self, states: dict[bytes, bytes]) -> None:
        for replica_id, state in states.items():
            if self._told.get(replica_id) != state:
                self._tell(beat_of(state))
        self._told = states

    def _tell(self, item: Item) -> None:
        for tap in self._taps:
            tap.put(item)


class Feeds:
    """The feeds of one process: each runs while it is watched."""

    def __init__(self, events: Events, logger: Logger) -> None:
        self._events = events
        self._logger = logger
        self._feeds: dict[str, tuple[Feed, asyncio.Task[None]]] = {}

    @property
    def followed(self) -> list[str]:
        """Models that are followed now."""
        return list(self._feeds)

    @contextmanager
    def tap(self, model: str) -> Iterator[Tap]:
        """Give a queue of what comes from now on for a model.

        Raises:
            ResourceExhausted: too many models are followed.
        """
        feed = self._feed(model)
        try:
            with feed.tap() as tap:
                yield tap
        finally:
            if not feed.watched:
                _, task = self._feeds.pop(model)
                task.cancel()

    def _feed(self, model: str) -> Feed:
        if model in self._feeds:
            return self._feeds[model][0]
        if len(self._feeds) >= FEEDS_MAX:
            raise ResourceExhausted(f"this registry follows {FEEDS_MAX} models already; use another one")
        feed = Feed(self._events, model, self._logger)
        self._feeds[model] = feed, asyncio.get_running_loop().create_task(feed.run())
        return feed
