"""Questions to the engine about leases, and who waits for their end."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable

from kvrelay.engine.protocol import (
    CallId,
    Command,
    ConfirmLease,
    ExtendLeases,
    LeasedPage,
    LeasePrefix,
    LeaseReply,
    ReleaseLeases,
)
from kvrelay.errors import DeadlineExceeded, KvrelayError


class LeaseCalls:
    """Pairs lease commands with their replies. Belongs to one event loop.

    Every call may raise DeadlineExceeded (no answer within `timeout_s`), Unavailable (the engine is dead) and
    ResourceExhausted (its command queue is full).

    Args:
        send: puts a command on the engine's queue.
        send_surely: the same for one that must not be lost.
    """

    def __init__(self, *, send: Callable[[Command], None], send_surely: Callable[[Command], None]) -> None:
        self._send = send
        self._send_surely = send_surely
        self._numbers = itertools.count(1)
        self._open: dict[CallId, asyncio.Future[LeaseReply]] = {}
        self._watched: dict[str, asyncio.Event] = {}

    async def lease_prefix(self, block_keys: bytes, *, skip_blocks: int, ttl_s: float, timeout_s: float) -> LeaseReply:
        """Lease the longest held prefix of the keys, at once or not at all."""
        return await self._call(
            lambda call_id: LeasePrefix(call_id=call_id, block_keys=block_keys, skip_blocks=skip_blocks, ttl_s=ttl_s),
            timeout_s,
        )

    async def extend(self, lease_ids: Iterable[str], *, ttl_s: float, timeout_s: float) -> LeaseReply:
        """Move the deadlines of leases. Without leases it is a question whether the engine lives."""
        ids = tuple(lease_ids)
        reply = await self._call(lambda call_id: ExtendLeases(call_id=call_id, lease_ids=ids, ttl_s=ttl_s), timeout_s)
        self._note_ended(reply.ended)
        return reply

    async def confirm(self, lease_id: str, pages: tuple[LeasedPage, ...], *, timeout_s: float) -> LeaseReply:
        """Ask for the verdict on a pull, which ends the lease."""
        reply = await self._call(
            lambda call_id: ConfirmLease(call_id=call_id, lease_id=lease_id, pages=pages), timeout_s
        )
        self._note_ended([lease_id])
        return reply

    def release(self, lease_ids: Iterable[str]) -> None:
        """End leases that will not be pulled; unknown ones are ignored."""
        ids = tuple(lease_ids)
        self._send_surely(ReleaseLeases(lease_ids=ids))
        self._note_ended(ids)

    async def ended(self, lease_id: str, *, timeout_s: float) -> None:
        """Wait until a lease was confirmed, released or found expired here, or until the time is over."""
        ended = self._watched.setdefault(lease_id, asyncio.Event())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await ended.wait()
        finally:
            self._watched.pop(lease_id, None)

    def take(self, reply: LeaseReply) -> None:
        """Pass an answer of the engine on to who waits for it."""
        answer = self._open.get(reply.call_id)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def fail(self, error: KvrelayError) -> None:
        """The engine is dead: nothing will be answered any more."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(error)
        self._note_ended(tuple(self._watched))

    async def _call(self, command: Callable[[CallId], Command], timeout_s: float) -> LeaseReply:
        call_id = next(self._numbers)
        answer: asyncio.Future[LeaseReply] = asyncio.get_running_loop().create_future()
        self._open[call_id] = answer
        try:
            self._send(command(call_id))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"the engine did not answer a lease call within {timeout_s:g} s") from None
        finally:
            del self._open[call_id]

    def _note_ended(self, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            if lease_id in self._watched:
                self._watched[lease_id].set()
