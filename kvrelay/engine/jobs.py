"""Jobs: what the engine was asked to do, and how far it is."""

import enum
from dataclasses import dataclass, field

from kvrelay.engine.protocol import AgentInfo, LeaseGrant, PullStats
from kvrelay.engine.pulls import Pull
from kvrelay.engine.runner import Draw
from kvrelay.engine.scheduler import Work
from kvrelay.engine.sequence import Limits, Sequence
from kvrelay.types import Sampling, Usage


class Phase(enum.Enum):
    """How far a job is. Only QUEUED jobs wait for room; a HELD one has pinned its prefix and nothing else."""

    HELD = "waits for a lease, or for orders after a lost one"
    LOADING = "waits for pages of its prefix from a lower tier"
    FETCHING = "waits for a prefix that another replica holds, and has pinned its own"
    QUEUED = "waits for room"
    PULLING = "has room; pages are being read from the lease's owner"
    UNCONFIRMED = "has read everything; waits for verdict or first token"
    RUNNING = "computes"


WAITING = frozenset({Phase.HELD, Phase.LOADING, Phase.FETCHING, Phase.QUEUED})
"""Phases of jobs that have no room yet."""


@dataclass(slots=True, eq=False, kw_only=True)
class Fetch:
    """A prefix that a job wants from another replica, or has got.

    Attributes:
        lease_id: the holder's lease; empty before there is one.
        pull: the pull of it.
        start: tokens of the prefix that were held here before.
        end: tokens of the prefix once it was confirmed; 0 until then.
        stats: what was moved, once it was confirmed.
    """

    lease_id: str = ""
    pull: Pull | None = None
    start: int = 0
    end: int = 0
    stats: PullStats | None = None

    def tokens_within(self, cached_tokens: int) -> int:
        """Return how many of the sequence's first `cached_tokens` tokens came this way."""
        return max(min(self.end, cached_tokens) - self.start, 0)


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """What every job has.

    Attributes:
        job_id: chosen by the front.
        sequence: its tokens and pages.
        sampling: how tokens are chosen; the seed is set.
        limits: when the answer ends.
        priority: higher first.
        arrived_at_s: when it came.
        deadline_at_s: end of the caller's patience.
        phase: how far it is.
        fetch: the prefix that another replica holds more of; None when nobody does.
        tier_asked: whether a lower tier was to bring pages of its prefix; it is asked once.
    """

    job_id: str
    sequence: Sequence
    sampling: Sampling
    limits: Limits
    priority: int
    arrived_at_s: float
    deadline_at_s: float
    phase: Phase = Phase.QUEUED
    fetch: Fetch | None = None
    tier_asked: bool = False

    def pulls(self) -> list[Pull]:
        """Return the pulls that are under way, or not confirmed yet."""
        return [] if self.fetch is None or self.fetch.pull is None else [self.fetch.pull]

    def work(self) -> Work:
        """Describe the job to the scheduler."""
        sequence = self.sequence
        return Work(
            job_id=self.job_id,
            remaining=sequence.remaining,
            decoding=sequence.remaining == 1 and sequence.output_tokens > 0,
            priority=self.priority,
            arrived_at_s=self.arrived_at_s,
            deadline_at_s=self.deadline_at_s,
        )

    def draw(self) -> Draw | None:
        """Describe the token after the sequence's end."""
        written = self.sequence.output_tokens
        return Draw(
            sampling=self.sampling,
            position=len(self.sequence.ids),
            min_tokens_left=max(self.limits.min_tokens - written, 0),
            stop_ids=self.limits.stop_ids,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillJob(Job):
    """A prompt to read for another replica.

    Attributes:
        held_tokens: tokens that the puller has.
        lease_ttl_s: wished life of the lease.
        forced_next: the token that comes next, if it is known.
        lease: what was granted.
        cached_tokens: tokens that were cached here at grant.
        told_pages: pages of the lease that were announced as final.
        compute_s: time of the steps it took part in.
        predicted_s: what that was predicted to be when it had its pages.
    """

    held_tokens: int
    lease_ttl_s: float
    forced_next: int | None
    lease: LeaseGrant | None = None
    cached_tokens: int = 0
    told_pages: int = 0
    compute_s: float = 0.0
    predicted_s: float = 0.0

    def draw(self) -> Draw | None:
        """Describe the token after the prompt; nothing is drawn when it is known."""
        # Not super(): a class with slots is made anew by the decorator, and the old one is what super() would mean.
        return None if self.forced_next is not None else Job.draw(self)


@dataclass(slots=True, eq=False)
class RemotePrompt:
    """The lease that a job's prompt comes from.

    Attributes:
        lease: what was granted.
        source: the owner's memory.
        ready_pages: pages of the lease that are final.
        all_ready: all of them are.
        first_known: the owner's first token was told; the front expects no other token before that.
    """

    lease: LeaseGrant
    source: AgentInfo
    ready_pages: int = 0
    all_ready: bool = False
    first_known: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class GenerateJob(Job):
    """An answer to write.

    Attributes:
        first_token: a token that was told to the client already and is not yet in the sequence.
        remote: where the prompt comes from; None when it is read here.
        pull: the pull under way, or done and not confirmed.
        pinned_pages: pages at the front of the block table that were held before the pull.
        confirmed: the owner said that what was pulled is valid.
        usage: what it cost so far.
    """

    first_token: int | None = None
    remote: RemotePrompt | None = None
    pull: Pull | None = None
    pinned_pages: int = 0
    confirmed: bool = False
    usage: Usage = field(default_factory=Usage)

    def pulls(self) -> list[Pull]:
        """Return the pulls that are under way, or not confirmed yet."""
        return Job.pulls(self) if self.pull is None else [self.pull]

    def work(self) -> Work:
        """Describe the job to the scheduler."""
        work = Job.work(self)
        if self.remote is None or self.phase is not Phase.QUEUED:
            return work
        return Work(
            job_id=work.job_id,
            remaining=work.remaining,
            ready=self.remote.all_ready,
            priority=work.priority,
            arrived_at_s=work.arrived_at_s,
            deadline_at_s=work.deadline_at_s,
        )
