"""One try at one prefill replica: start, handshake, pull, verdict."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from decode_svc.reasons import TIMEOUT, LegFailedError, reason_of
from decode_svc.trace import Trace
from decode_svc.values import Order, Reply, Target, Wrote
from kvrelay.config import LEASE_EXTENSION_INTERVAL_S
from kvrelay.decode_events import Finished, LegMoved, LegState
from kvrelay.engine.protocol import (
    AttachLease,
    Ended,
    Event,
    Failed,
    FirstToken,
    FirstTokenKnown,
    Granted,
    JobId,
    PiecesFinal,
    PiecesReady,
    Pulled,
    PullFailed,
    PullStats,
    Verdict,
)
from kvrelay.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KvrelayError,
)
from kvrelay.replica.bridge import EngineBridge
from kvrelay.replica.channel import JobChannel
from kvrelay.replica.peers import UNCONFIRMED, Peers
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.replica_client import PrefillOrder
from kvrelay.types import FinishReason, Usage

PREFILL_SILENCE_S = 60.0
"""Longest time without a word of the prefill replica before its first token. A dead or hanging process is noticed by
the connection within seconds; this bounds waiting in the queue of one that lives."""

EXTEND_TIMEOUT_S = 2.0
"""Longest wait for one extension; a lease lives through several lost ones."""

EXTENSIONS_PER_TTL = 3
"""At least so many extensions within a lease's life, however short it was made."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """What the legs of one attempt share.

    Attributes:
        order: the attempt.
        held_tokens: tokens of the prompt that the engine holds for it.
        usage: what the attempt has cost so far.
        first: the token that follows the prompt, once it was passed on (or was before): final, and forced from then on.
        finished: the answer has ended.
    """

    order: Order
    held_tokens: int
    usage: Usage
    channel: JobChannel
    bridge: EngineBridge
    peers: Peers
    deadline: Deadline
    lease_ttl_s: float
    trace: Trace
    first: int | None
    finished: bool = False


class Leg:
    """One try at one prefill replica.

    The stream of the prefill replica posts its events into the job's channel under `leg_id`, so that there is one
    sequence of events to decide on: the replica's, and the engine's about the pull.
    """

    def __init__(self, read: Reading, target: Target, leg_id: JobId) -> None:
        self._read = read
        self._peer = target.peer
        self._holder = target.holder
        self._id = leg_id
        self._granted: Granted | None = None
        self._lease_over = False
        self._first: FirstToken | None = None
        self._confirmed = False
        self._heard_at_s = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    async def replies(self) -> AsyncGenerator[Reply, None]:
        """Yield what the leg brings, until the KV is here or the answer has ended.

        Raises:
            LegFailedError: the next target is to be asked.
        """
        self._spawn_reader()
        try:
            while not self._done:
                event = await self._next_event()
                for reply in await self._handle(event):
                    yield reply
        finally:
            await self._close()

    @property
    def _done(self) -> bool:
        return self._read.finished or (self._confirmed and self._first is not None)

    @property
    def _lease_id(self) -> str:
        return self._granted.lease.lease_id if self._granted is not None else ""

    # ------------------------------------------------------------ events

    async def _next_event(self) -> Event:
        wait_s = self._read.deadline.left_s()
        if self._first is None:
            wait_s = min(wait_s, self._heard_at_s + PREFILL_SILENCE_S - time.monotonic())
        try:
            return await self._read.channel.get(timeout_s=wait_s)
        except TimeoutError:
            self._read.deadline.check("waiting for the prompt's KV")
            raise LegFailedError(TIMEOUT) from None

    async def _handle(self, event: Event) -> tuple[Reply, ...]:
        match event:
            case Ended():
                return self._on_ended(event)
            case Pulled() if event.lease_id == self._lease_id:
                return await self._on_pulled(event)
            case PullFailed() if event.lease_id == self._lease_id:
                raise LegFailedError(event.reason or "pull")
            case Granted() | PiecesFinal() | FirstToken() | Failed() if event.job_id == self._id:
                self._heard_at_s = time.monotonic()
                return await self._on_prefill(event)
            case _:
                return ()  # of an earlier leg

    async def _on_prefill(self, event: Granted | PiecesFinal | FirstToken | Failed) -> tuple[Reply, ...]:
        match event:
            case Granted():
                return await self._on_granted(event)
            case PiecesFinal():
                return self._on_pieces(event)
            case FirstToken():
                return self._on_first_token(event)
            case Failed():
                raise self._failure(event.error)

    async def _on_granted(self, event: Granted) -> tuple[Reply, ...]:
        self._granted = event
        usage = self._read.usage
        usage.prefill_cached_tokens = event.cached_tokens
        usage.prefill_pulled_tokens, usage.prefill_pulled_bytes = event.pulled_tokens, event.pulled_bytes
        try:
            source = await self._read.peers.agent(self._peer, self._read.deadline)
        except KvrelayError as error:
            raise self._failure(error) from error
        self._read.bridge.send(
            AttachLease(
                job_id=self._read.channel.job_id,
                lease=event.lease,
                source=source,
                prefill_cached_tokens=event.cached_tokens,
                prefill_pulled_tokens=event.pulled_tokens,
                prefill_pulled_bytes=event.pulled_bytes,
            )
        )
        self._tasks.append(asyncio.create_task(self._keep_lease(event.lease.lease_id, event.lease.ttl_s)))
        return ()

    def _on_pieces(self, event: PiecesFinal) -> tuple[Reply, ...]:
        self._read.bridge.send(
            PiecesReady(job_id=self._read.channel.job_id, lease_id=self._lease_id, pages=event.pages, all=event.all)
        )
        return (LegMoved(LegState.READY, self._peer),) if event.all else ()

    def _on_first_token(self, event: FirstToken) -> tuple[Reply, ...]:
        self._first = event
        self._read.usage.computed_tokens += event.computed_tokens
        replies: list[Reply] = []
        if self._read.first is None:
            self._read.first = event.token
            self._read.usage.output_tokens = len(self._read.order.prompt.output_ids) // 4 + 1
            logprobs = (event.logprobs,) if event.logprobs is not None else ()
            replies.append(Wrote(event.position, (event.token,), logprobs))
        if event.finish_reason is not None:
            self._lease_over = True
            self._read.finished = True
            replies.append(self._finish(event, event.finish_reason))
        else:
            self._read.bridge.send(
                FirstTokenKnown(
                    job_id=self._read.channel.job_id,
                    token=self._read.first,
                    computed_tokens=event.computed_tokens,
                )
            )
        return tuple(replies)

    async def _on_pulled(self, event: Pulled) -> tuple[Reply, ...]:
        self._read.trace.pulled(self._peer, event.stats)
        with self._read.trace.confirm(self._peer):
            valid, reason = await self._read.peers.confirm(self._peer, event.lease_id, event.pages, self._read.deadline)
        self._read.bridge.send(Verdict(job_id=self._read.channel.job_id, lease_id=event.lease_id, valid=valid))
        self._lease_over = reason != UNCONFIRMED
        if not valid:
            raise LegFailedError(reason or "declined")
        self._confirmed = True
        self._note_pulled(event.stats)
        return (LegMoved(LegState.PULLED, self._peer),)

    def _note_pulled(self, stats: PullStats) -> None:
        usage = self._read.usage
        usage.pulled_tokens = usage.prompt_tokens - usage.cached_tokens
        usage.pulled_bytes, usage.pull_s, usage.pull_descriptors = stats.bytes, stats.busy_s, stats.descriptors

    # ------------------------------------------------------------ ends

    def _on_ended(self, event: Ended) -> tuple[Reply, ...]:
        """The engine saw that a token which was passed on before completes the answer."""
        self._read.finished = True
        return (Finished(event.reason, event.usage, event.stop_id),)

    def _finish(self, event: FirstToken, reason: FinishReason) -> Finished:
        return Finished(reason, self._read.usage, event.token if reason is FinishReason.STOP else None)

    def _failure(self, error: KvrelayError) -> Exception:
        """Return what an error of the peer means: the client's fault, the end of its patience, or the next target."""
        if isinstance(error, InvalidArgument) and self._granted is None:
            return error
        if isinstance(error, DeadlineExceeded) and self._read.deadline.expired:
            return error
        return LegFailedError(reason_of(error))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._granted is not None and not self._done:
            self._give_up_pull()
        if self._granted is not None and not self._lease_over and not self._confirmed:
            self._read.peers.release(self._peer, self._lease_id)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _give_up_pull(self) -> None:
        """Have the engine drop lease and room: nobody may hold room while the next replica is asked for a lease."""
        with contextlib.suppress(KvrelayError):  # then a new lease, or reading locally, replaces this one
            self._read.bridge.send(Verdict(job_id=self._read.channel.job_id, lease_id=self._lease_id, valid=False))

    # ------------------------------------------------------------ tasks beside

    def _spawn_reader(self) -> None:
        self._tasks.append(asyncio.create_task(self._read_stream(), name=f"prefill {self._id}"))

    async def _read_stream(self) -> None:
        """Post what the prefill replica tells into the channel."""
        read, order = self._read, self._read.order
        ask = PrefillOrder(
            request_id=order.request_id,
            attempt=order.attempt,
            prompt=order.prompt,
            sampling=order.sampling,
            forced_next=read.first,
            held_tokens=read.held_tokens,
            puller=read.peers.me,
            priority=order.priority,
            lease_ttl_s=read.lease_ttl_s,
            holder=self._holder,
        )
        events = read.peers.prefill(self._peer).start(
            ask, incarnation=self._peer.incarnation, job_id=self._id, timeout_s=read.deadline.left_s()
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    read.channel.post(event)
        except KvrelayError as error:
            read.channel.post(Failed(job_id=self._id, error=error))
        except Exception as error:  # noqa: BLE001 - whatever broke the stream must end the leg, not leave it waiting
            read.trace.leg_crashed(self._peer, error)
            broken = InternalError("reading the prefill replica's stream failed; the log tells why")
            read.channel.post(Failed(job_id=self._id, error=broken))

    async def _keep_lease(self, lease_id: str, ttl_s: float) -> None:
        """Extend the lease until the leg closes; tell the channel when the owner has ended it."""
        pause_s = min(LEASE_EXTENSION_INTERVAL_S, ttl_s / EXTENSIONS_PER_TTL)
        source = self._read.peers.source(self._peer)
        while True:
            await asyncio.sleep(pause_s)
            with contextlib.suppress(KvrelayError):  # the next one may get through
                ended = await source.extend(
                    owner_incarnation=self._peer.incarnation,
                    lease_ids=[lease_id],
                    ttl_s=ttl_s,
                    timeout_s=EXTEND_TIMEOUT_S,
                )
                if lease_id in ended:
                    self._read.channel.post(
                        PullFailed(job_id=self._read.channel.job_id, lease_id=lease_id, reason="expired")
                    )
                    return
