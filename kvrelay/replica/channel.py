"""The events of one job, as its handler reads them."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from kvrelay.engine.protocol import Ended, Event, Failed, FirstToken, JobId, PiecesFinal, Tokens
from kvrelay.errors import InternalError
from kvrelay.types import TokenLogprobs

CHANNEL_ENTRIES_MAX = 64
"""Entries a job may leave unread. Token and piece events coalesce, so a correct job needs fewer than ten."""

EndsJob: TypeAlias = Ended | Failed | FirstToken


@dataclass(slots=True)
class _TokenRun:
    """Consecutive Tokens events of one job, merged in place while nobody reads them."""

    job_id: JobId
    position: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def continues(self, event: Tokens) -> bool:
        return event.job_id == self.job_id and event.position == self.position + len(self.ids)

    def append(self, event: Tokens) -> None:
        self.ids.extend(event.ids)
        self.logprobs.extend(event.logprobs)

    def event(self) -> Tokens:
        return Tokens(job_id=self.job_id, position=self.position, ids=tuple(self.ids), logprobs=tuple(self.logprobs))


class JobChannel:
    """Bounded mailbox of one job; lives on the event loop's thread.

    A slow reader costs O(1) entries: consecutive `Tokens` merge, a newer `PiecesFinal` replaces the one before it.
    Others than the engine may post too (the stream of a prefill replica does), under a job id of their own.

    Attributes:
        job_id: the engine's job.
        ended: the engine has told the end of the job; there is nothing left to cancel.
    """

    def __init__(self, job_id: JobId) -> None:
        self.job_id = job_id
        self.ended = False
        self._entries: deque[Event | _TokenRun] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def post(self, event: Event) -> None:
        """Add an event; never blocks."""
        if isinstance(event, EndsJob) and event.job_id == self.job_id:
            self.ended = True
        if not self._merge(event):
            self._append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self, *, timeout_s: float) -> Event:
        """Return the next event. One reader at a time.

        Raises:
            TimeoutError: no event came within `timeout_s`.
            KvrelayError: the job failed; this is its error.
        """
        if not self._entries:
            await self._wait(timeout_s)
        entry = self._entries.popleft()
        if isinstance(entry, _TokenRun):
            return entry.event()
        if isinstance(entry, Failed) and entry.job_id == self.job_id:
            raise entry.error
        return entry

    async def _wait(self, timeout_s: float) -> None:
        assert self._reader is None, "a channel has one reader"
        self._reader = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._reader
        finally:
            self._reader = None

    def _merge(self, event: Event) -> bool:
        last = self._entries[-1] if self._entries else None
        if isinstance(event, Tokens) and isinstance(last, _TokenRun) and last.continues(event):
            last.append(event)
            return True
        if isinstance(event, PiecesFinal) and isinstance(last, PiecesFinal) and last.lease_id == event.lease_id:
            self._entries[-1] = event
            return True
        return False

    def _append(self, event: Event) -> None:
        if len(self._entries) >= CHANNEL_ENTRIES_MAX:
            self._entries.clear()
            event = Failed(job_id=self.job_id, error=InternalError("the job's mailbox overflowed; see the log"))
        if isinstance(event, Tokens):
            self._entries.append(_TokenRun(event.job_id, event.position, list(event.ids), list(event.logprobs)))
        else:
            self._entries.append(event)
