"""Keeps a replica's entry in the registry: register, heartbeat, block changes, deregister.

Runs on a thread with an event loop and a channel of its own, so that neither a busy front nor a busy engine delays a
heartbeat: a heartbeat proves that the process lives (liveness), its `ready` that the engine advances (readiness).
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

from kvrelay.directory import Answer
from kvrelay.errors import FailedPrecondition, InvalidArgument, KvrelayError
from kvrelay.replica.blocks import BlockLedger
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.registry_client import RegistryClient
from kvrelay.telemetry import get_logger
from kvrelay.types import Replica, ReplicaState

PUBLISH_INTERVAL_S = 0.05
"""Time between batches of block changes: a router learns of a block within about a tenth of a second."""

CALL_TIMEOUT_S = 2.0
"""Longest wait for one answer of the registry; well under the liveness TTL, so that a lost call costs no membership."""

SNAPSHOT_TIMEOUT_S = 30.0
"""Longest time for a snapshot: a million blocks are 16 MB, staged in chunks."""

RETRY_S_MIN = 0.2
RETRY_S_MAX = 2.0
"""Bounds of the pause before the registry is tried again. Short: a heartbeat is cheap, and a TTL is a few seconds."""

STOP_TIMEOUT_S = 5.0
"""Longest wait for the thread to deregister and end."""


class Membership:
    """A replica's agent at the registry.

    The registry may come and go: the agent then is `degraded`, retries, registers again under the same incarnation
    and sends its blocks anew. Only a refusal (the replica does not fit the pool, or a newer start of it has taken its
    place) is final; it is told to `on_refused` on the agent's thread.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        registry: str,
        ledger: BlockLedger,
        state: Callable[[], ReplicaState],
        on_refused: Callable[[KvrelayError], None],
        heartbeat_interval_s: float,
        ttl_s: float,
        log_level: str = "info",
    ) -> None:
        """`state` is called on the agent's thread."""
        self._replica = replica
        self._model = replica.identity.model
        self._registry = registry
        self._ledger = ledger
        self._state = state
        self._on_refused = on_refused
        self._interval_s = heartbeat_interval_s
        self._ttl_s = ttl_s
        self._log = get_logger("membership", level=log_level)
        self._epoch: int | None = None
        self._snapshot_due = False
        self._degraded = False
        self._deregister = False
        self._retry_s = RETRY_S_MIN
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"membership {replica.peer.replica_id}", daemon=True)

    @property
    def registered(self) -> bool:
        """The registry knows this replica, as far as is known here."""
        return self._epoch is not None

    @property
    def degraded(self) -> bool:
        """The registry does not answer; the replica goes on serving."""
        return self._degraded

    def start(self) -> None:
        """Start the agent's thread."""
        self._thread.start()

    def nudge(self) -> None:
        """Send the next heartbeat now, since the state has changed in a way that routers should know at once."""
        self._call(self._beat_now)

    async def stop(self, *, deregister: bool) -> None:
        """End the agent, taking the replica out of the registry first if wished. Calling it twice is no error."""
        self._deregister = self._deregister or deregister
        self._call(self._end)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def _call(self, action: Callable[[], None]) -> None:
        if self._up.wait(STOP_TIMEOUT_S):
            with contextlib.suppress(RuntimeError):  # the agent has ended and closed its loop
                self._loop.call_soon_threadsafe(action)

    # ------------------------------------------------------------ agent thread

    def _beat_now(self) -> None:
        self._nudged.set()

    def _end(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._nudged = asyncio.Event()
        self._up.set()
        channel = open_channel(self._registry)
        self._client = RegistryClient(channel)
        loops = [self._loop.create_task(self._beat_loop()), self._loop.create_task(self._publish_loop())]
        try:
            await self._stopping.wait()
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            if self._deregister and self.registered:
                await self._leave()
        finally:
            await channel.close()

    async def _beat_loop(self) -> None:
        while True:
            pause_s = await self._guarded(self._beat, self._interval_s)
            self._nudged.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._nudged.wait()

    async def _publish_loop(self) -> None:
        while True:
            pause_s = await self._guarded(self._publish, PUBLISH_INTERVAL_S)
            await asyncio.sleep(pause_s)

    async def _guarded(self, action: Callable[[], Awaitable[None]], pause_s: float) -> float:
        """Run one round; return the pause before the next."""
        try:
            await action()
        except (FailedPrecondition, InvalidArgument) as error:
            self._log.error("registry_refused", error=error.message)
            self._on_refused(error)
            self._stopping.set()
        except KvrelayError as error:
            return self._away(error)
        return pause_s

    def _away(self, error: KvrelayError) -> float:
        if not self._degraded:
            self._log.warning("registry_away", registry=self._registry, error=error.message)
        self._degraded = True
        self._retry_s = min(self._retry_s * 2, RETRY_S_MAX)
        return random.uniform(RETRY_S_MIN, self._retry_s)  # noqa: S311 - spreads retries, no secret

    def _back(self) -> None:
        if self._degraded:
            self._log.info("registry_back", registry=self._registry)
        self._degraded = False
        self._retry_s = RETRY_S_MIN

    async def _beat(self) -> None:
        epoch = self._epoch
        if epoch is None:
            await self._register()
        else:
            answer = await self._client.heartbeat(
                self._replica.peer,
                model=self._model,
                epoch=epoch,
                state=self._state(),
                ttl_s=self._ttl_s,
                timeout_s=CALL_TIMEOUT_S,
            )
            self._take(answer, epoch)
            if answer.register_again:
                await self._register()
        self._back()

    async def _register(self) -> None:
        state = self._state()
        entry = replace(self._replica, draining=state.draining, state=state)
        epoch, _ = await self._client.register(entry, ttl_s=self._ttl_s, timeout_s=CALL_TIMEOUT_S)
        self._ledger.restart()
        self._snapshot_due = self._ledger.held > 0
        self._epoch = epoch
        self._log.info("registered", registry=self._registry, epoch=epoch, blocks=self._ledger.held)

    async def _publish(self) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        if self._snapshot_due:
            await self._put_snapshot(epoch)
            return
        batch = self._ledger.batch()
        if batch is None:
            return
        answer = await self._client.publish(
            self._replica.peer, model=self._model, epoch=epoch, batch=batch, timeout_s=CALL_TIMEOUT_S
        )
        if epoch != self._epoch:
            return  # registered anew meanwhile: the ledger has begun again
        if answer == Answer():
            self._ledger.acknowledge()
        self._take(answer, epoch)

    async def _put_snapshot(self, epoch: int) -> None:
        seq, keys = self._ledger.snapshot()
        taken = await self._client.put_snapshot(
            self._replica.peer, model=self._model, epoch=epoch, seq=seq, keys=keys, timeout_s=SNAPSHOT_TIMEOUT_S
        )
        if epoch == self._epoch:
            self._snapshot_due = not taken
        self._log.info("snapshot_sent", blocks=len(keys), accepted=taken)

    def _take(self, answer: Answer, epoch: int) -> None:
        if epoch != self._epoch:
            return
        if answer.register_again:
            self._epoch = None
            self._log.warning("registration_lapsed", epoch=epoch)
        if answer.snapshot_wanted:
            self._snapshot_due = True

    async def _leave(self) -> None:
        try:
            await self._client.deregister(self._replica.peer, model=self._model, timeout_s=CALL_TIMEOUT_S)
        except KvrelayError as error:
            # The entry lapses with its time to live.
            self._log.warning("deregister_failed", error=error.message)
