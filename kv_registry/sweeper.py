"""Notices replicas whose life has ended, and whether the store answers. Any number of registries may sweep."""

import asyncio
from typing import Final, NoReturn

from kv_registry.store import Store
from kvrelay.errors import KvrelayError
from kvrelay.logs import Logger

SWEEP_INTERVAL_S: Final = 0.5
"""Time between sweeps: what it adds to the liveness TTL until a dead replica is gone."""

ANSWERED_WITHIN_S: Final = 3.0
"""The store counts as away when it has not answered for so long: several sweeps, above one socket timeout."""


class Sweeper:
    """Sweeps all models for ever."""

    def __init__(self, store: Store, logger: Logger) -> None:
        self._store = store
        self._logger = logger
        self._away = False

    @property
    def store_answers(self) -> bool:
        """Whether the store has answered recently."""
        return self._store.link.answered_within(ANSWERED_WITHIN_S)

    async def run(self) -> NoReturn:
        """Sweep for ever; while the store is away, log it once and try again."""
        while True:
            try:
                await self._sweep()
                self._note(away=False)
            except KvrelayError as error:
                self._note(away=True, reason=error.message)
            except Exception:
                self._logger.exception("sweep.crashed")
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def _sweep(self) -> None:
        for model in await self._store.members.models():
            for replica_id, incarnation in await self._store.sweep(model):
                self._logger.warning("replica.expired", model=model, replica_id=replica_id, incarnation=incarnation)
            await self._store.reservations.loads(model)  # clears away what has lapsed

    def _note(self, *, away: bool, reason: str = "") -> None:
        if away and not self._away:
            self._logger.error("store.degraded", reason=reason)
        elif self._away and not away:
            self._logger.info("store.recovered")
        self._away = away
