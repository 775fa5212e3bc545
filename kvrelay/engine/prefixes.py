"""Prefixes that another replica holds: pulled into the cache before the job that wants them queues.

A job in this state holds its own pinned prefix and, while it reads, the pages it reads into; it never waits for room,
so that replicas which pull from each other cannot wait for each other. Whatever fails, the job goes on and computes.
"""

from kvrelay.engine.jobs import Fetch, Job, Phase
from kvrelay.engine.parts import Parts
from kvrelay.engine.protocol import AttachLease, Command, Pulled, PullFailed, ReadLocally, Verdict
from kvrelay.engine.pulls import TIMEOUT, Pull, PullError

LAYOUT = "layout"
GAP = "gap"
SHORT = "short"
ROOM = "room"


class Prefixes:
    """The life of a wanted prefix: fetching → pulled → confirmed and cached; the job is queued in the end."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def wait(self, job: Job, prefix_tokens: int) -> float | None:
        """Have a new job wait for a prefix of that many tokens, with what is held here pinned.

        Returns how long computing the difference would take, s; None when the job does not wait: nothing is lacking.
        """
        sequence, tables = job.sequence, self._parts.tables
        end = self._usable(job, prefix_tokens)
        if end <= tables.held_tokens(sequence):
            return None
        tables.pin(sequence)
        job.phase = Phase.FETCHING
        job.fetch = Fetch(start=sequence.computed)
        return self._parts.speed.compute_s(sequence.computed, end, chunk_tokens=self._parts.chunk_tokens)

    def order(self, job: Job, command: Command) -> None:
        """Take a command for a waiting job; those that mean nothing to it are ignored."""
        match command:
            case AttachLease():
                self.attach(job, command)
            case Verdict():
                self.verdict(job, command)
            case ReadLocally():
                self.read_locally(job)

    def attach(self, job: Job, command: AttachLease) -> None:
        """Pull a lease if there is room for it at once."""
        fetch = job.fetch
        assert fetch is not None
        if fetch.lease_id:
            return
        fetch.lease_id = command.lease.lease_id
        try:
            self._begin(job, fetch, command)
        except PullError as error:
            self._lose(job, error.reason)

    def poll(self, job: Job) -> None:
        """See how the job's READs are doing."""
        fetch = job.fetch
        assert fetch is not None
        pull = fetch.pull
        if pull is None or not pull.pending:
            return
        try:
            self._parts.puller.poll(pull)
        except PullError as error:
            self._lose(job, error.reason)
            return
        if pull.done:
            told = Pulled(job_id=job.job_id, lease_id=fetch.lease_id, pages=pull.remote, stats=pull.stats())
            self._parts.emit(told)

    def verdict(self, job: Job, command: Verdict) -> None:
        """Put what was pulled into the cache, or drop it."""
        fetch = job.fetch
        assert fetch is not None
        pull, sequence, tables = fetch.pull, job.sequence, self._parts.tables
        if command.lease_id != fetch.lease_id:
            return
        if not command.valid:
            self.read_locally(job)
        elif pull is not None and pull.done:
            fetch.end = sequence.computed = len(sequence.pages) * tables.page_tokens
            fetch.stats = pull.stats()
            fetch.pull = None
            tables.publish(sequence)
            self._queue(job)

    def read_locally(self, job: Job) -> None:
        """Have the job compute what is not here."""
        self._let_go(job, stuck=False)

    # ------------------------------------------------------------ inside

    def _usable(self, job: Job, tokens: int) -> int:
        """Return how many of a prefix's tokens the job can use: whole pages, and never its last token."""
        page_tokens = self._parts.tables.page_tokens
        return min(tokens, len(job.sequence.ids) - 1) // page_tokens * page_tokens

    def _begin(self, job: Job, fetch: Fetch, command: AttachLease) -> None:
        sequence, tables, lease = job.sequence, self._parts.tables, command.lease
        end = self._usable(job, lease.first_position + len(lease.pages) * tables.page_tokens)
        self._check(job, command, end)
        if not tables.admit(sequence, end):
            raise PullError(ROOM)
        fetch.start, pinned = sequence.computed, len(sequence.pages)
        if fetch.start >= end:
            raise PullError(SHORT)  # someone else has brought it meanwhile
        tables.grow(sequence, end)
        before = lease.first_position // tables.page_tokens
        fetch.pull = Pull(
            source=command.source,
            remote=lease.pages[pinned - before : end // tables.page_tokens - before],
            local=list(sequence.pages[pinned:]),
            tokens=end - fetch.start,
        )
        self._parts.puller.post(fetch.pull, len(fetch.pull.remote))

    def _check(self, job: Job, command: AttachLease, end: int) -> None:
        """Raise PullError when a lease does not fit the job."""
        lease, page_tokens = command.lease, self._parts.tables.page_tokens
        if command.source.layout != self._parts.facts.layout or lease.first_position % page_tokens:
            raise PullError(LAYOUT)
        if lease.first_position > job.sequence.computed:
            raise PullError(GAP)
        whole = all(page.valid_tokens == page_tokens for page in lease.pages)
        inside = all(0 <= page.page < command.source.pages for page in lease.pages)
        if not whole or not inside or end <= job.sequence.computed:
            raise PullError(SHORT)

    def _lose(self, job: Job, reason: str) -> None:
        assert job.fetch is not None
        lease_id = job.fetch.lease_id
        self._let_go(job, stuck=reason == TIMEOUT)
        self._parts.emit(PullFailed(job_id=job.job_id, lease_id=lease_id, reason=reason))

    def _let_go(self, job: Job, *, stuck: bool) -> None:
        fetch = job.fetch
        assert fetch is not None
        if fetch.pull is not None:
            quarantined = self._parts.puller.give_up(fetch.pull, stuck=stuck)
            self._parts.tables.cut(job.sequence, fetch.start // self._parts.tables.page_tokens, quarantined=quarantined)
            fetch.pull = None
        self._queue(job)

    def _queue(self, job: Job) -> None:
        """Queue the job as any other: its prefix lies in the cache, where admission finds it."""
        self._parts.tables.cut(job.sequence, 0)
        job.phase = Phase.QUEUED
