"""The asyncio front of an engine side: commands in, events out, one thread that reads."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvrelay.config import EngineConfig
from kvrelay.engine.protocol import (
    BlocksChanged,
    Cancel,
    Command,
    EngineDied,
    Event,
    Failed,
    Generate,
    JobId,
    LeaseReply,
    Prefill,
    Started,
    StateChanged,
    TierLoad,
    TierWrote,
)
from kvrelay.engine.side import EngineSide, start_engine
from kvrelay.errors import DeadlineExceeded, KvrelayError, ResourceExhausted, Unavailable
from kvrelay.replica import progress
from kvrelay.replica.channel import JobChannel
from kvrelay.replica.lease_calls import LeaseCalls
from kvrelay.replica.progress import Progress
from kvrelay.types import ReplicaState

RECEIVE_TIMEOUT_S = 0.25
"""How often the reader looks up from an idle engine to see whether it lives and whether it should stop."""

BATCHES_IN_FLIGHT = 8
"""Event batches handed to the loop and not handled yet; past it the reader waits, and the engine's queue with it."""

RETRY_SEND_S = 0.01
"""Pause before a command that must not be lost is offered to a full queue again."""

STOP_TIMEOUT_S = 10.0
"""Longest wait for the engine to end by itself."""


class EngineBridge:
    """Owns an `EngineSide` and speaks with it for the whole front side of a replica.

    Everything but the properties `state`, `ready` and `healthy` belongs to the event loop that called `start`.

    Attributes:
        leases: questions about leases.
        state: the engine's latest state.
    """

    def __init__(self, config: EngineConfig, *, replica_id: str, incarnation: str) -> None:
        self._config = config
        self._replica_id = replica_id
        self._incarnation = incarnation
        self.state = ReplicaState()
        self._channels: dict[JobId, JobChannel] = {}
        self.leases = LeaseCalls(send=self.send, send_surely=self._send_surely)
        self._numbers = itertools.count(1)
        self._backlog: deque[Command] = deque()
        self._blocks_listener: Callable[[BlocksChanged], None] | None = None
        self._tier_listener: Callable[[TierLoad | TierWrote], None] | None = None
        self._turned = asyncio.Event()
        self._progress = Progress()
        self._room = threading.Semaphore(BATCHES_IN_FLIGHT)
        self._stopping = threading.Event()
        self._side: EngineSide | None = None
        self._started: Started | None = None
        self._watch: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    async def start(self, *, timeout_s: float) -> Started:
        """Start the engine and wait until it is up.

        Raises:
            DeadlineExceeded: it was not up within `timeout_s`.
            KvrelayError: it died on the way.
        """
        self._loop = asyncio.get_running_loop()
        self._up: asyncio.Future[Started] = self._loop.create_future()
        self._death: asyncio.Future[KvrelayError] = self._loop.create_future()
        self._side = await asyncio.to_thread(
            start_engine, self._config, replica_id=self._replica_id, incarnation=self._incarnation
        )
        self._thread = threading.Thread(
            target=self._read, args=(self._side,), name=f"events {self._replica_id}", daemon=True
        )
        self._thread.start()
        try:
            async with asyncio.timeout(timeout_s):
                ends: list[asyncio.Future[Any]] = [self._up, self._death]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.stop()
            raise DeadlineExceeded(f"the engine was not up within {timeout_s:g} s") from None
        if self._death.done():
            await self.stop()
            raise self._death.result()
        self._started = self._up.result()
        self._watch = self._loop.create_task(self._probe(), name="engine probe")
        return self._started

    async def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the engine; jobs that still run fail as Unavailable. Calling it twice is no error."""
        if self._side is None or self._stopping.is_set():
            return
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._side.stop, timeout_s)
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, timeout_s)
        self._die(Unavailable("the engine was stopped"))

    @property
    def started(self) -> Started:
        """What the engine told when it came up; only after `start`."""
        assert self._started is not None
        return self._started

    @property
    def healthy(self) -> bool:
        """The engine is up and has not died."""
        return self._started is not None and not self._death.done()

    @property
    def ready(self) -> bool:
        """The engine answers, and its steps advance while there is work."""
        return self.healthy and not self._progress.stalled(time.monotonic())

    @property
    def jobs(self) -> int:
        """Jobs that handlers of this process hold open."""
        return len(self._channels)

    async def died(self) -> KvrelayError:
        """Wait until the engine has died and return why."""
        return await asyncio.shield(self._death)

    async def idle(self) -> None:
        """Wait until no job runs and no lease lives, or the engine is dead."""
        while self.healthy and (self._channels or self.state.leases):
            self._turned.clear()
            await self._turned.wait()

    def on_blocks(self, listener: Callable[[BlocksChanged], None]) -> None:
        """Have changes of the cached blocks told to `listener`, on the reader's thread; it must not block.

        Call it before `start`: changes are not kept for a listener that comes late.
        """
        self._blocks_listener = listener

    def on_tier(self, listener: Callable[[TierLoad | TierWrote], None]) -> None:
        """Have what moves between the engine's pool and lower tiers told to `listener`, on the loop's thread."""
        self._tier_listener = listener

    # ------------------------------------------------------------ jobs

    def job_id(self, request_id: str, attempt: int) -> JobId:
        """Return a name for a new job that no other job of this incarnation has."""
        return f"{request_id}/{attempt}#{next(self._numbers)}"

    @contextlib.asynccontextmanager
    async def job(self, command: Generate | Prefill) -> AsyncIterator[JobChannel]:
        """Run a job; leaving the block cancels it unless it has ended.

        Raises:
            Unavailable: the engine is dead.
            ResourceExhausted: its command queue is full.
        """
        channel = JobChannel(command.job_id)
        self._channels[command.job_id] = channel
        try:
            self.send(command)
            yield channel
        finally:
            del self._channels[command.job_id]
            self._turned.set()
            if not channel.ended:
                self._send_surely(Cancel(job_id=command.job_id))

    def send(self, command: Command) -> None:
        """Put a command on the engine's queue.

        Raises:
            Unavailable: the engine is dead.
            ResourceExhausted: the queue is full.
        """
        if self._side is None or not self.healthy:
            raise Unavailable("the engine of this replica is not running; another replica may answer")
        self._side.send(command)

    # ------------------------------------------------------------ commands that must not be lost

    def _send_surely(self, command: Command) -> None:
        if self.healthy:
            self._backlog.append(command)  # in order behind what waits already
            if len(self._backlog) == 1:
                self._flush()

    def _flush(self) -> None:
        # Bounded by the jobs and leases that exist: each is cancelled or released once.
        while self._backlog and self.healthy:
            try:
                self.send(self._backlog[0])
            except ResourceExhausted:
                self._loop.call_later(RETRY_SEND_S, self._flush)
                return
            self._backlog.popleft()
        self._backlog.clear()

    # ------------------------------------------------------------ reader thread

    def _read(self, side: EngineSide) -> None:
        while not self._stopping.is_set():
            events = side.receive(RECEIVE_TIMEOUT_S)
            if events:
                self._hand_over(events)
            elif not side.alive():
                self._hand_over([EngineDied(error=Unavailable("the engine ended without a word"))])
                return

    def _hand_over(self, events: list[Event]) -> None:
        self._progress.seen(events, time.monotonic())
        for event in events:
            if isinstance(event, StateChanged):
                self.state = event.state
            elif isinstance(event, BlocksChanged) and self._blocks_listener is not None:
                self._blocks_listener(event)
        while not self._room.acquire(timeout=RECEIVE_TIMEOUT_S):
            if self._stopping.is_set():
                return
        with contextlib.suppress(RuntimeError):  # the loop was closed under us: nobody listens any more
            self._loop.call_soon_threadsafe(self._dispatch, events)

    # ------------------------------------------------------------ loop thread

    def _dispatch(self, events: list[Event]) -> None:
        self._room.release()
        for event in events:
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        match event:
            case Started():
                if not self._up.done():
                    self._up.set_result(event)
            case LeaseReply():
                self.leases.take(event)
            case EngineDied():
                self._die(event.error)
            case StateChanged():
                self._turned.set()
            case TierLoad() | TierWrote():
                if self._tier_listener is not None:
                    self._tier_listener(event)
            case BlocksChanged():
                pass  # taken by the reader thread
            case _:
                channel = self._channels.get(event.job_id)
                if channel is not None:
                    channel.post(event)

    def _die(self, error: KvrelayError) -> None:
        if not self._death.done():
            self._death.set_result(error)
            self._turned.set()
        lost = Unavailable("the engine of this replica died; another replica may answer")
        for channel in self._channels.values():
            if not channel.ended:
                channel.post(Failed(job_id=channel.job_id, error=lost))
        self.leases.fail(lost)

    async def _probe(self) -> None:
        """Ask a silent engine for a sign of life, so that `ready` tells a wedged one from an idle one."""
        while True:
            await asyncio.sleep(progress.PROBE_INTERVAL_S)
            if self._progress.silent(time.monotonic()):
                with contextlib.suppress(KvrelayError):
                    await self.leases.extend((), ttl_s=1.0, timeout_s=progress.STALL_AFTER_S)
