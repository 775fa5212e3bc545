"""Keeps the mirror by watching the registry: reconnects, resumes, and reloads what does not add up."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from random import Random
from typing import Final, Protocol

from kvrelay.directory import CaughtUp, Watched
from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.logs import Logger
from router.fleet import Fleet

RECONNECT_MIN_S: Final = 0.1
RECONNECT_MAX_S: Final = 2.0
"""Backoff between watches: a registry that is back is found again within about two seconds."""

RELOAD_MIN_S: Final = 1.0
RELOAD_MAX_S: Final = 60.0
"""Backoff between reloads for a damaged block set: one that is wrong in the registry itself must not make every router
load everything over and over."""

SILENCE_S: Final = 3.0
"""Longest wait for an event: six heartbeats. A silent watch belongs to a registry whose store is away, or to an empty
fleet, in which case asking again costs next to nothing."""


class RegistryWatch(Protocol):
    """The part of the registry's client that is needed here."""

    def watch(self, model: str, position: str = "") -> AsyncGenerator[Watched, None]:
        """Follow membership and directory of a model."""
        ...


class Watcher:
    """Feeds the fleet from the registry.

    Attributes:
        state: "starting", "ready", or "degraded" while the registry does not answer and the mirror is used as it was.
    """

    def __init__(self, registry: RegistryWatch, fleet: Fleet, *, model: str, logger: Logger, rng: Random) -> None:
        self.state = "starting"
        self._registry = registry
        self._fleet = fleet
        self._model = model
        self._logger = logger
        self._rng = rng
        self._reload_s = RELOAD_MIN_S

    async def run(self) -> None:
        """Watch for ever; run as a task."""
        pause_s = RECONNECT_MIN_S
        while True:
            try:
                await self._follow("" if self._fleet.damaged else self._fleet.position)
                pause_s = self._reload_s
                self._reload_s = min(RELOAD_MAX_S, 2 * self._reload_s)
            except TimeoutError:
                pause_s = RECONNECT_MIN_S
                self._logger.info("watch.silent", after_s=SILENCE_S)
            except KvrelayError as error:
                pause_s = RECONNECT_MIN_S if self.state == "ready" else min(RECONNECT_MAX_S, 2 * pause_s)
                self._degrade(error)
            self._fleet.broken()
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))

    async def _follow(self, position: str) -> None:
        """Take in events until a block set turns out to be damaged.

        Raises:
            KvrelayError: the watch broke.
            TimeoutError: it was silent for too long.
        """
        async with aclosing(self._registry.watch(self._model, position)) as events:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    watched = await anext(events, None)
                if watched is None:
                    raise Unavailable("the registry ended the watch")
                self._fleet.take(watched)
                if isinstance(watched.event, CaughtUp):
                    self._caught_up()
                if self.state == "ready" and self._fleet.damaged and not self._fleet.loading:
                    self._logger.warning("watch.reload")
                    return

    def _caught_up(self) -> None:
        if self.state != "ready":
            self._logger.info("watch.caught_up", replicas=sum(1 for _ in self._fleet.members()))
        self.state = "ready"
        if not self._fleet.damaged:
            self._reload_s = RELOAD_MIN_S

    def _degrade(self, error: KvrelayError) -> None:
        if self.state != "ready":
            return
        self.state = "degraded"
        self._logger.warning("watch.degraded", error=type(error).__name__, reason=error.message)
