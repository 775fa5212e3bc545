"""One request, from its decision to its last token, over as many attempts as it takes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvrelay.client.values import Decision, Delta, Finish, Part
from kvrelay.decode_events import Accepted, Finished, LegMoved, LegState
from kvrelay.directory import Leg
from kvrelay.errors import Cancelled, KvrelayError, PeerLost, ResourceExhausted, StaleIncarnation, Unavailable
from kvrelay.logs import Logger
from kvrelay.rpc.convert import TokenSpan
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.decode_client import DecodeOrder, DecodeStream
from kvrelay.types import FinishReason, Peer
from router.answer import Answer
from router.booking import BookingKey
from router.dispatch import Dispatcher, Placed, Trip
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.order import Order, decision, decode_order
from router.reservations import Reservations
from router.tally import Tally

ATTEMPTS_MAX: Final = 4
"""Attempts of one request: enough to outlive two replicas that die one after the other, few enough that a request that
breaks replicas does not break them all."""

RECOVERY_WAIT_S: Final = 30.0
"""How long a request that was under way waits for a replica to come back when none is left: a restart with its model to
load. A request that has just come is told at once."""

RECOVERY_POLL_S: Final = 0.1
"""Time between looks at the fleet meanwhile."""

ELSEWHERE: Final = (Unavailable, StaleIncarnation, ResourceExhausted, Cancelled)
"""Failures of an attempt that another replica may not have."""

StartDecode: TypeAlias = Callable[[Peer, DecodeOrder, float], DecodeStream]
"""Starts an attempt at a decode replica within so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What requests are served with; shared by all."""

    fleet: Fleet
    dispatcher: Dispatcher
    reservations: Reservations
    start_decode: StartDecode
    metrics: RouterMetrics
    logger: Logger
    policy: str


class Request:
    """Serves one request."""

    def __init__(self, order: Order, answer: Answer, means: Means, deadline: Deadline) -> None:
        self._order = order
        self._answer = answer
        self._means = means
        self._deadline = deadline
        self._tally = Tally(prompt_tokens=len(order.prompt_ids), began_at_s=time.monotonic())
        self._avoid: set[Peer] = set()
        self._decode: Peer | None = None
        self._attempt = order.first_attempt
        self._done = answer.reason is not None

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Yield a decision for each attempt, the text, and the finish.

        Raises:
            Unavailable: no replica could take it, or the last attempt failed too.
            ResourceExhausted: every replica is full.
            DeadlineExceeded: the deadline passed.
            KvrelayError: the request itself is at fault.
        """
        while not self._done:
            self._decode = None
            try:
                async with aclosing(self._run()) as parts:
                    async for part in parts:
                        yield part
            except ELSEWHERE as error:
                if self._decode is None:  # it was not even sent
                    raise
                self._failed(self._decode, error)
            finally:
                self._means.reservations.end(self._key)
            self._attempt += 1
        yield self._finish()

    # ------------------------------------------------------------ one attempt

    async def _run(self) -> AsyncGenerator[Part, None]:
        placed = await self._placed()
        self._decode = decode = placed.choice.decode.peer
        yield self._decided(placed)
        order = decode_order(self._order, placed, attempt=self._attempt, output_ids=self._answer.output)
        stream = self._means.start_decode(decode, order, self._deadline.left_s())
        try:
            with self._means.fleet.lifelines.hold(decode, stream.cut):
                async for event in stream:
                    delta = self._take(event, placed)
                    if delta is not None:
                        yield delta
                    if self._done:
                        return
        finally:
            stream.close()

    def _decided(self, placed: Placed) -> Decision:
        self._tally.attempt(remote=bool(placed.targets))
        told = decision(self._order, placed, attempt=self._attempt, policy=self._means.policy)
        if self._tally.attempts == 1:
            self._means.metrics.dispatched(
                prompt_tokens=told.prompt_tokens,
                available_tokens=told.available_tokens,
                captured_tokens=max(told.prefill_cached_tokens, told.decode_cached_tokens),
            )
        return told

    def _take(self, event: Accepted | TokenSpan | LegMoved | Finished, placed: Placed) -> Delta | None:
        match event:
            case TokenSpan():
                return self._tokens(event)
            case LegMoved():
                self._tally.told(event)
                self._leg(event, placed)
            case Accepted():
                self._tally.told(event)
                self._means.fleet.trust(placed.choice.decode.peer)
            case Finished():
                self._tally.told(event)
                return self._finished(event)
        return None

    def _tokens(self, span: TokenSpan) -> Delta | None:
        before = len(self._answer.output)
        delta = self._answer.take(span, attempt=self._attempt)
        if written := len(self._answer.output) - before:
            self._tally.wrote(written, now_s=time.monotonic())
            # The prompt has been read, wherever that was.
            self._means.reservations.end_prefill(self._key)
        # The replica knows of every other end itself and tells what the answer cost.
        self._done = bool(self._answer.stop_string)
        return delta

    def _leg(self, moved: LegMoved, placed: Placed) -> None:
        """Keep the booked prefill leg where the work is."""
        reservations, choice = self._means.reservations, placed.choice
        booked = choice.prefill.peer if choice.prefill else choice.decode.peer
        match moved.state:
            case LegState.READY | LegState.PULLED:
                reservations.end_prefill(self._key)
            case LegState.STARTED if moved.peer and moved.peer != booked:
                reservations.move_prefill(self._key, Leg(peer=moved.peer, prefill_s=choice.cost.compute_s))
            case LegState.LOCAL if choice.prefill:
                reservations.move_prefill(self._key, Leg(peer=choice.decode.peer, prefill_s=choice.cost.compute_s))
            case LegState.FAILED if moved.peer and moved.reason == "unreachable":
                self._means.fleet.suspect(moved.peer)

    def _finished(self, event: Finished) -> Delta | None:
        self._answer.reason = self._answer.reason or event.reason
        self._done = True
        text = self._answer.flush()
        return Delta(text=text) if text else None

    # ------------------------------------------------------------ between attempts

    async def _placed(self) -> Placed:
        trip = self._trip()
        if self._attempt > self._order.first_attempt:
            await self._recovery(trip)
        self._deadline.check("the request was not answered")
        return await self._means.dispatcher.place(trip)

    async def _recovery(self, trip: Trip) -> None:
        """Wait for someone who can go on with the answer; whoever places it finds out when nobody came."""
        wait = self._deadline.sooner(RECOVERY_WAIT_S)
        while not (self._means.dispatcher.possible(trip) or wait.expired):  # noqa: ASYNC110 - suspicions end by time
            await asyncio.sleep(RECOVERY_POLL_S)

    def _failed(self, decode: Peer, error: KvrelayError) -> None:
        """Take note of a failed attempt, and raise when there is to be no other."""
        made = self._attempt - self._order.first_attempt + 1
        self._means.logger.warning(
            "request.attempt_failed",
            attempt=self._attempt,
            replica_id=decode.replica_id,
            error=type(error).__name__,
            reason=error.message,
            output_tokens=len(self._answer.output),
        )
        if isinstance(error, PeerLost):
            self._means.fleet.suspect(decode)
        else:
            self._avoid.add(decode)
        if self._answer.reason is not None:
            self._done = True  # all tokens are here, only the goodbye was lost
            return
        out_of_room = isinstance(error, ResourceExhausted) and not self._means.dispatcher.possible(self._trip())
        if made >= ATTEMPTS_MAX or out_of_room:
            raise error
        self._means.metrics.retried(type(error).__name__)

    # ------------------------------------------------------------ values

    @property
    def _key(self) -> BookingKey:
        return self._order.request_id, self._attempt

    def _trip(self) -> Trip:
        assert self._order.sampling.max_tokens is not None
        return Trip(
            key=self._key,
            prompt_ids=self._order.prompt_ids,
            output_ids=self._answer.output,
            max_tokens=self._order.sampling.max_tokens,
            salt=self._order.salt,
            avoid=frozenset(self._avoid),
        )

    def _finish(self) -> Finish:
        tally = self._tally
        self._means.metrics.finished(ttft_s=tally.ttft_s, tpot_s=tally.tpot_s)
        return Finish(
            reason=self._reason(),
            usage=tally.usage(len(self._answer.output)),
            stop_string=self._answer.stop_string,
            attempts=tally.attempts,
            ttft_s=tally.ttft_s,
            tpot_s=tally.tpot_s,
            prefill=tally.prefill,
            prefill_reason=tally.prefill_reason,
        )

    def _reason(self) -> FinishReason:
        reason = self._answer.reason or FinishReason.STOP
        wanted, most = self._order.wanted_tokens, self._order.sampling.max_tokens
        # max_tokens is cut to what the context leaves, so it is the context that ended an answer which wanted more.
        cut = wanted is None or (most is not None and most < wanted)
        return FinishReason.CONTEXT if reason is FinishReason.LENGTH and cut else reason
