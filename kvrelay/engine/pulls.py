"""Pulls: READs of leased pages straight into a sequence's own pages, and the quarantine of those that were given up."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvrelay.engine.pool import PagePool
from kvrelay.engine.protocol import AgentInfo, LeasedPage, PullStats
from kvrelay.errors import KvrelayError
from kvrelay.kv.transfer import Read, ReadState, Transfer

TIMEOUT = "timeout"

SLOWEST_BYTES_PER_S: Final = 10e6
"""Rate down to which a link counts as slow, not as dead. A READ shows nothing before its end, and READs beside each
other share the link and end together, so patience must grow with what is under way. Slower than this, one core computes
a small model's KV anew in less time (500 tokens/s of 23 kB)."""


class PullError(Exception):
    """A pull cannot go on; `reason` is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Posted:
    """A READ under way, and the pages it writes."""

    read: Read
    local_pages: list[int]


@dataclass(slots=True, eq=False, kw_only=True)
class Pull:
    """The pull of one lease.

    Attributes:
        source: the owner's memory.
        remote: leased pages to read, in order.
        local: pages to read them into.
        tokens: tokens in those pages.
        posted: pages whose READ was posted, from the front.
        pending: READs under way.
        progress_at_s: when a READ was last posted or done.
        busy_s: time with READs under way, up to the last moment without one.
        busy_since_s: the first post since then.
    """

    source: AgentInfo
    remote: tuple[LeasedPage, ...]
    local: list[int]
    tokens: int
    posted: int = 0
    pending: list[Posted] = field(default_factory=list)
    progress_at_s: float = 0.0
    bytes: int = 0
    descriptors: int = 0
    transport: str = ""
    first_posted_at_s: float = 0.0
    last_done_at_s: float = 0.0
    busy_s: float = 0.0
    busy_since_s: float = 0.0

    @property
    def done(self) -> bool:
        """True when everything was read."""
        return self.posted == len(self.remote) and not self.pending

    @property
    def pending_bytes(self) -> int:
        """Bytes under way."""
        return sum(len(posted.local_pages) for posted in self.pending) * self.source.layout.page_bytes

    def stats(self) -> PullStats:
        """Return what was moved."""
        return PullStats(
            tokens=self.tokens,
            pages=len(self.remote),
            bytes=self.bytes,
            descriptors=self.descriptors,
            elapsed_s=self.last_done_at_s - self.first_posted_at_s,
            busy_s=self.busy_s,
            transport=self.transport,
        )


@dataclass(slots=True, eq=False)
class GivenUp:
    """A READ that nobody waits for; its pages are in quarantine until its state is final."""

    posted: Posted
    patience_ends_at_s: float
    abandoned: bool


class Puller:
    """Posts and polls READs. Owns the quarantined pages."""

    def __init__(self, transfer: Transfer, pool: PagePool, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._transfer = transfer
        self._pool = pool
        self._timeout_s = timeout_s
        self._clock = clock
        self._given_up: list[GivenUp] = []

    @property
    def watching(self) -> bool:
        """True while given-up READs are not final."""
        return bool(self._given_up)

    @property
    def quarantined_pages(self) -> int:
        """Pages into which a given-up READ may still land."""
        return sum(len(given_up.posted.local_pages) for given_up in self._given_up)

    def post(self, pull: Pull, pages: int) -> None:
        """Post a READ of the first `pages` pages, as far as it was not posted before.

        Raises:
            PullError: the transport refuses the arguments.
        """
        if pages <= pull.posted:
            return
        remote = [leased.page for leased in pull.remote[pull.posted : pages]]
        local = pull.local[pull.posted : pages]
        now_s = self._clock()
        try:
            read = self._transfer.read(pull.source, remote_pages=remote, local_pages=local)
        except KvrelayError as error:
            raise PullError("refused") from error
        if not pull.posted:
            pull.first_posted_at_s = now_s
        if not pull.pending:
            pull.busy_since_s = now_s
        pull.posted = pages
        pull.progress_at_s = now_s
        pull.pending.append(Posted(read, local))

    def poll(self, pull: Pull) -> None:
        """Take note of READs that ended.

        Raises:
            PullError: one of them failed, or none made progress in time.
        """
        now_s = self._clock()
        for posted in list(pull.pending):
            state = posted.read.state()
            if state is ReadState.PENDING:
                continue
            pull.pending.remove(posted)
            if state is ReadState.FAILED:
                reason = posted.read.reason()
                posted.read.close()
                raise PullError(reason or "failed")
            self._count(pull, posted, now_s)
        if pull.pending and now_s - pull.progress_at_s > self._timeout_s + pull.pending_bytes / SLOWEST_BYTES_PER_S:
            raise PullError(TIMEOUT)

    def give_up(self, pull: Pull, *, stuck: bool = False) -> frozenset[int]:
        """Stop waiting for a pull; return the pages that go into quarantine now.

        Args:
            pull: whose pages the caller is about to give back.
            stuck: its READs made no progress: new ones from that peer must not queue behind them.
        """
        patience_ends_at_s = self._clock() + self._timeout_s
        pages: list[int] = []
        for posted in pull.pending:
            if stuck:
                self._transfer.abandon(posted.read)
            self._given_up.append(GivenUp(posted, patience_ends_at_s, abandoned=stuck))
            pages += posted.local_pages
        pull.pending.clear()
        return frozenset(pages)

    def watch(self) -> None:
        """Free the pages of given-up READs that are final; abandon those that are stuck too."""
        waiting = []
        for given_up in self._given_up:
            if given_up.posted.read.state() is not ReadState.PENDING:
                given_up.posted.read.close()
                for page in given_up.posted.local_pages:
                    self._pool.readmit(page)
                continue
            if not given_up.abandoned and self._clock() > given_up.patience_ends_at_s:
                self._transfer.abandon(given_up.posted.read)
                given_up.abandoned = True
            waiting.append(given_up)
        self._given_up = waiting

    def _count(self, pull: Pull, posted: Posted, now_s: float) -> None:
        stats = posted.read.stats()
        posted.read.close()
        pull.progress_at_s = pull.last_done_at_s = now_s
        if not pull.pending:
            pull.busy_s += now_s - pull.busy_since_s
        pull.bytes += stats.bytes
        pull.descriptors += stats.descriptors
        pull.transport = stats.transport
