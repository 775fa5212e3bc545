"""A transfer for tests that does what a plan says to chosen reads and passes the others through."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvrelay.engine.protocol import AgentInfo
from kvrelay.kv.transfer import Read, ReadState, ReadStats, Transfer

INJECTED = "injected"
"""Reason of a read that fails by plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What happens to which read; reads are numbered from 0 in the order they are posted.

    Attributes:
        fail: these turn FAILED without having moved anything.
        hold: these stay PENDING until `FaultyTransfer.let_go`, as if the peer were stopped; their bytes land after.
        delay_polls: these stay PENDING for so many polls more, then pass through.
    """

    fail: frozenset[int] = frozenset()
    hold: frozenset[int] = frozenset()
    delay_polls: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def seeded(cls, seed: int, *, reads: int, fail_share: float = 0.0, delay_polls_max: int = 0) -> "FaultPlan":
        """Draw a plan for the first `reads` reads; the same seed gives the same plan."""
        draw = random.Random(seed)  # noqa: S311 - reproducible on purpose
        return cls(
            fail=frozenset(number for number in range(reads) if draw.random() < fail_share),
            delay_polls={number: draw.randint(0, delay_polls_max) for number in range(reads)},
        )


class FaultyRead:
    """A read that the plan treats; posted to the inner transfer only once nothing holds it any more."""

    def __init__(self, post: "_Post", *, held: bool, delay_polls: int, fails: bool) -> None:
        self.inner: Read | None = None
        self.held = held
        self._post = post
        self._delay_polls = delay_polls
        self._fails = fails

    def state(self) -> ReadState:
        """Return the state now; counts as a poll."""
        if self._fails:
            return ReadState.FAILED
        if self.held:
            return ReadState.PENDING
        if self._delay_polls > 0:
            self._delay_polls -= 1
            return ReadState.PENDING
        if self.inner is None:
            self.inner = self._post.now()
        return self.inner.state()

    def reason(self) -> str:
        """Return why it FAILED."""
        if self._fails:
            return INJECTED
        return "" if self.inner is None else self.inner.reason()

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

    def fail(self) -> None:
        """Turn a read that has not been posted yet FAILED."""
        if self.inner is None:
            self._fails = True


@dataclass(frozen=True, slots=True)
class _Post:
    transfer: Transfer
    source: AgentInfo
    remote_pages: tuple[int, ...]
    local_pages: tuple[int, ...]

    def now(self) -> Read:
        return self.transfer.read(self.source, remote_pages=list(self.remote_pages), local_pages=list(self.local_pages))


class FaultyTransfer:
    """Wraps a transfer; implements `kvrelay.kv.transfer.Transfer`. `let_go` may be called from any thread."""

    def __init__(self, inner: Transfer, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
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
        """Post a read, now or when the plan lets it go."""
        number = len(self.reads)
        delay_polls = self._plan.delay_polls.get(number, 0)
        read = FaultyRead(
            _Post(self._inner, source, tuple(remote_pages), tuple(local_pages)),
            held=number in self._plan.hold,
            delay_polls=delay_polls,
            fails=number in self._plan.fail,
        )
        self.reads.append(read)
        if not delay_polls:
            read.state()  # posts it unless it is held or fails
        return read

    def let_go(self, numbers: Iterable[int]) -> None:
        """Hold these reads no longer."""
        for number in numbers:
            self.reads[number].held = False

    def abandon(self, read: Read) -> None:
        """Note it, and pass it through for a read that is posted. A held one stays PENDING and lands when let go."""
        assert isinstance(read, FaultyRead)
        self.abandoned.append(read)
        if read.inner is not None:
            self._inner.abandon(read.inner)

    def forget(self, agent_name: str) -> None:
        """Pass through; held reads of that peer turn FAILED."""
        for read in self.reads:
            if read.peer == agent_name:
                read.fail()
        self._inner.forget(agent_name)

    def close(self) -> None:
        """Pass through; reads that are not posted yet turn FAILED."""
        for read in self.reads:
            read.fail()
        self._inner.close()
