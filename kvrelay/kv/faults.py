"""A transfer for tests that treats each read as a plan says: late, stale, cut short, failed; deterministic by seed."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvrelay.engine.protocol import AgentInfo
from kvrelay.kv.transfer import Read, ReadState, ReadStats, Transfer

INJECTED = "injected"
"""Reason of a read that fails by plan."""
KILLED = "disconnected"
"""Reason of a read whose peer was killed meanwhile; the word that NIXL's errors get."""
KILLED_SHARE = 0.5
"""Share of a read's pages that have landed when its peer is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one read; as it stands, nothing.

    Attributes:
        delay_polls: it stays PENDING for so many polls more.
        hold: it stays PENDING until `FaultyTransfer.let_go`.
        early: the bytes land when the read is posted and only its end is told late. Otherwise they land at its end,
            however long after it was given up: they are then what the remote pages hold at that time.
        fails: it ends FAILED.
        landed_share: share of its pages that land although it fails.
    """

    delay_polls: int = 0
    hold: bool = False
    early: bool = False
    fails: bool = False
    landed_share: float = 0.0


NO_FAULT = Fault()

Plan: TypeAlias = Callable[[int], Fault]
"""What happens to the n-th read, counted from 0 in the order they are posted."""


def listed(faults: Mapping[int, Fault]) -> Plan:
    """Return a plan that treats the listed reads and leaves the others alone."""
    return lambda number: faults.get(number, NO_FAULT)


def seeded(seed: int, *, share: float, delay_polls_max: int) -> Plan:
    """Return a plan that treats a share of all reads; the same seed gives the same plan.

    Args:
        seed: of the plan.
        share: how many of the reads something happens to, [0, 1].
        delay_polls_max: longest delay, in polls; short ones are more frequent.
    """

    def plan(number: int) -> Fault:
        draw = random.Random(f"{seed}.{number}")  # noqa: S311 - reproducible on purpose
        if draw.random() >= share:
            return NO_FAULT
        return Fault(
            delay_polls=round(delay_polls_max * draw.random() ** 2),
            early=draw.random() < 0.3,
            fails=draw.random() < 0.2,
            landed_share=draw.random(),
        )

    return plan


@dataclass(frozen=True, slots=True)
class _Post:
    """A read that can be posted to the inner transfer, whole or in part."""

    transfer: Transfer
    source: AgentInfo
    remote_pages: list[int]
    local_pages: list[int]

    def now(self, share: float) -> Read | None:
        pages = round(share * len(self.local_pages))
        if not pages:
            return None
        return self.transfer.read(
            self.source, remote_pages=self.remote_pages[:pages], local_pages=self.local_pages[:pages]
        )


class FaultyRead:
    """A read that a plan treats; it reaches the inner transfer when its bytes are to land."""

    def __init__(self, post: _Post, fault: Fault) -> None:
        self.fault = fault
        self.held = fault.hold
        self.stopped = False
        self.inner: Read | None = None
        self._post = post
        self._posted = False
        self._reason = INJECTED
        if fault.early:
            self.land()

    def state(self) -> ReadState:
        """Return the state now; counts as a poll."""
        if self._waits():
            return ReadState.PENDING
        self.land()
        state = ReadState.FAILED if self.inner is None else self.inner.state()
        return ReadState.FAILED if self.fault.fails and state is ReadState.DONE else state

    def reason(self) -> str:
        """Return why it FAILED."""
        return self._reason if self.fault.fails or self.inner is None else self.inner.reason()

    def stats(self) -> ReadStats:
        """Return what the inner read moved."""
        assert self.inner is not None, "stats of a read that is not done"
        return self.inner.stats()

    def close(self) -> None:
        """Give the inner read's handle back."""
        assert self.state() is not ReadState.PENDING, "closed a read that may still land"
        if self.inner is not None:
            self.inner.close()

    @property
    def peer(self) -> str:
        """Agent name of the peer that is read from."""
        return self._post.source.agent_name

    def land(self) -> None:
        """Have the inner transfer move the bytes, unless it has already."""
        if not self._posted:
            self._posted = True
            self.inner = self._post.now(self.fault.landed_share if self.fault.fails else 1.0)

    def kill(self, landed_share: float) -> None:
        """End a read that has not ended: a share of its pages lands, and it FAILED."""
        if self._posted and not self._waits():
            return
        self.fault = dataclasses.replace(self.fault, delay_polls=0, fails=True, landed_share=landed_share)
        self.held = self.stopped = False
        self._reason = KILLED
        self.land()

    def _waits(self) -> bool:
        if self.held or self.stopped:
            return True
        if not self.fault.delay_polls:
            return False
        self.fault = dataclasses.replace(self.fault, delay_polls=self.fault.delay_polls - 1)
        return True


class FaultyTransfer:
    """Wraps a transfer; implements `kvrelay.kv.transfer.Transfer`. The faults may be steered from any thread."""

    def __init__(self, inner: Transfer, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan
        self._stopped: set[str] = set()
        self._open: list[FaultyRead] = []
        self.reads: list[FaultyRead] = []
        self.abandoned: list[FaultyRead] = []

    def register(self, *, base_address: int, pages: int, page_bytes: int, memory: str, device_id: int) -> None:
        """Pass through."""
        self._inner.register(
            base_address=base_address, pages=pages, page_bytes=page_bytes, memory=memory, device_id=device_id
        )

    def agent(self) -> tuple[str, bytes]:
        """Pass through."""
        return self._inner.agent()

    def read(self, source: AgentInfo, *, remote_pages: list[int], local_pages: list[int]) -> Read:
        """Post a read, now or when the plan lets it land."""
        fault = self._plan(len(self.reads))
        read = FaultyRead(_Post(self._inner, source, list(remote_pages), list(local_pages)), fault)
        read.stopped = source.agent_name in self._stopped
        self.reads.append(read)
        self._open.append(read)
        if fault == NO_FAULT and not read.stopped:
            read.land()
        return read

    def abandon(self, read: Read) -> None:
        """Note it, and pass it through for a read that was posted. Others stay PENDING and land later."""
        assert isinstance(read, FaultyRead)
        self.abandoned.append(read)
        if read.inner is not None:
            self._inner.abandon(read.inner)

    def forget(self, agent_name: str) -> None:
        """Pass through; that peer's reads that have not landed turn FAILED."""
        self.kill_peer(agent_name, landed_share=0.0)
        self._inner.forget(agent_name)

    def close(self) -> None:
        """Pass through; reads that have not landed turn FAILED."""
        for read in self.reads:
            read.kill(0.0)
        self._inner.close()

    # ------------------------------------------------------------ what happens meanwhile

    def poll_all(self) -> None:
        """Poll every read that is not over, as time does: bytes land whether or not anybody looks."""
        self._open = [read for read in self._open if read.state() is ReadState.PENDING]

    def let_go(self, numbers: Iterable[int]) -> None:
        """Hold these reads no longer."""
        for number in numbers:
            self.reads[number].held = False

    def stop_peer(self, agent_name: str) -> None:
        """Reads of this peer, present and to come, stay PENDING as if its process were stopped."""
        self._stopped.add(agent_name)
        self._set_stopped(agent_name, stopped=True)

    def resume_peer(self, agent_name: str) -> None:
        """The peer goes on, and so do its reads."""
        self._stopped.discard(agent_name)
        self._set_stopped(agent_name, stopped=False)

    def kill_peer(self, agent_name: str, *, landed_share: float = KILLED_SHARE) -> None:
        """The peer dies now, in the midst of its reads: a share of the pages lands, and they FAILED."""
        self._stopped.discard(agent_name)
        for read in self.reads:
            if read.peer == agent_name:
                read.kill(landed_share)

    def _set_stopped(self, agent_name: str, *, stopped: bool) -> None:
        for read in self.reads:
            if read.peer == agent_name:
                read.stopped = stopped
