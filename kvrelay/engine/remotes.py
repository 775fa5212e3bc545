"""Remote prompts: leases attached to jobs, pulled, confirmed, or lost."""

from kvrelay.engine.generates import Generates
from kvrelay.engine.intake import check_token
from kvrelay.engine.jobs import GenerateJob, Phase, RemotePrompt
from kvrelay.engine.parts import Parts
from kvrelay.engine.protocol import (
    AttachLease,
    FirstTokenKnown,
    PiecesReady,
    Pulled,
    PullFailed,
    Verdict,
)
from kvrelay.engine.pulls import TIMEOUT, Pull, PullError
from kvrelay.errors import InvalidArgument

LAYOUT = "layout"
GAP = "gap"
SHORT = "short"
EVICTED = "evicted"


class Remotes:
    """The life of a remote prompt: held → queued → pulling → unconfirmed → running, or back to held."""

    def __init__(self, parts: Parts, generates: Generates) -> None:
        self._parts = parts
        self._generates = generates

    def attach(self, job: GenerateJob, command: AttachLease) -> None:
        """Queue the job for room to pull a lease; it replaces an earlier one."""
        if job.phase is Phase.RUNNING or (job.phase is Phase.QUEUED and job.remote is None):
            return
        self._let_go(job)
        job.usage.prefill_cached_tokens = command.prefill_cached_tokens
        job.usage.prefill_pulled_tokens = command.prefill_pulled_tokens
        job.usage.prefill_pulled_bytes = command.prefill_pulled_bytes
        reason = self._misfit(job, command)
        if reason:
            self._parts.emit(PullFailed(job_id=job.job_id, lease_id=command.lease.lease_id, reason=reason))
            return
        job.remote = RemotePrompt(command.lease, command.source)
        job.phase = Phase.QUEUED

    def pieces_ready(self, job: GenerateJob, command: PiecesReady) -> None:
        """Pull what became final, if there is room already."""
        remote = job.remote
        if remote is None or remote.lease.lease_id != command.lease_id:
            return
        pages = len(remote.lease.pages)
        remote.ready_pages = max(remote.ready_pages, pages if command.all else min(command.pages, pages))
        remote.all_ready |= command.all
        if job.phase is Phase.PULLING:
            self._post(job)

    def first_token_known(self, job: GenerateJob, command: FirstTokenKnown) -> None:
        """Note the token that the client was told; it stays whatever becomes of the pull."""
        try:
            check_token("token", command.token, self._parts.facts)
        except InvalidArgument as error:
            self._generates.fail(job, error)
            return
        job.usage.computed_tokens += command.computed_tokens
        if job.phase is Phase.RUNNING:
            return
        if job.remote is not None:
            job.remote.first_known = True
        if job.first_token is None:
            if self._generates.end_with(job, command.token):
                return
            job.first_token = command.token
        if job.phase is Phase.QUEUED and job.remote is None:
            self._generates.take_first_token(job)
        self._run_if_complete(job)

    def verdict(self, job: GenerateJob, command: Verdict) -> None:
        """Use what was pulled; or drop lease and room, however far the pull is, and wait for orders."""
        remote, pull = job.remote, job.pull
        if job.phase is Phase.RUNNING or remote is None or remote.lease.lease_id != command.lease_id:
            return
        if not command.valid:
            self._let_go(job)
            return
        if job.phase is not Phase.UNCONFIRMED or job.confirmed or pull is None:
            return
        sequence = job.sequence
        job.confirmed = True
        job.usage.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        job.usage.pulled_tokens = sequence.prompt_tokens - job.usage.cached_tokens
        stats = pull.stats()
        job.usage.pulled_bytes, job.usage.pull_s = stats.bytes, stats.busy_s
        job.usage.pull_descriptors = stats.descriptors
        sequence.computed = len(sequence.ids)
        self._parts.tables.publish(sequence)
        self._run_if_complete(job)

    def read_locally(self, job: GenerateJob) -> None:
        """Queue the job for room to read its prompt here."""
        if job.phase is Phase.RUNNING or (job.phase is Phase.QUEUED and job.remote is None):
            return
        self._let_go(job)
        job.phase = Phase.QUEUED
        if job.first_token is not None:
            self._generates.take_first_token(job)

    def admit(self, job: GenerateJob) -> bool:
        """Give a queued job its room and start its pull; False when there is no room."""
        assert job.remote is not None
        if not self._generates.reserve(job):
            return False
        sequence, lease, tables = job.sequence, job.remote.lease, self._parts.tables
        job.pinned_pages = len(sequence.pages)
        skipped = job.pinned_pages - lease.first_position // tables.page_tokens
        tables.grow(sequence, len(sequence.ids))
        job.pull = Pull(
            source=job.remote.source,
            remote=lease.pages[skipped:],
            local=list(sequence.pages[job.pinned_pages :]),
            tokens=len(sequence.ids) - sequence.computed,
        )
        job.phase = Phase.PULLING
        self._post(job)
        return True

    def poll(self, job: GenerateJob) -> None:
        """See how the job's READs are doing."""
        assert job.pull is not None
        assert job.remote is not None
        try:
            self._parts.puller.poll(job.pull)
        except PullError as error:
            self._lose(job, error.reason)
            return
        if job.pull.done:
            job.phase = Phase.UNCONFIRMED
            self._parts.emit(
                Pulled(
                    job_id=job.job_id,
                    lease_id=job.remote.lease.lease_id,
                    pages=job.pull.remote,
                    stats=job.pull.stats(),
                )
            )

    def unpin(self, job: GenerateJob) -> None:
        """Take the pinned prefix from a waiting job: others cannot go on without the room."""
        self._parts.tables.cut(job.sequence, 0)
        if job.remote is not None and job.remote.lease.first_position:
            self._lose(job, EVICTED)

    # ------------------------------------------------------------ inside

    def _misfit(self, job: GenerateJob, command: AttachLease) -> str:
        """Say in a word why a lease does not fit the job; empty when it does."""
        facts, lease, tables = self._parts.facts, command.lease, self._parts.tables
        if command.source.layout != facts.layout or lease.first_position % tables.page_tokens:
            return LAYOUT
        if lease.first_position > job.sequence.computed:
            return GAP
        tokens = sum(page.valid_tokens for page in lease.pages)
        pages = tables.pages_for(len(job.sequence.ids)) - lease.first_position // tables.page_tokens
        whole = lease.first_position + tokens == len(job.sequence.ids) and len(lease.pages) == pages
        inside = all(0 <= page.page < command.source.pages for page in lease.pages)
        return "" if whole and inside else SHORT

    def _post(self, job: GenerateJob) -> None:
        assert job.pull is not None
        assert job.remote is not None
        skipped = len(job.remote.lease.pages) - len(job.pull.remote)
        try:
            self._parts.puller.post(job.pull, job.remote.ready_pages - skipped)
        except PullError as error:
            self._lose(job, error.reason)

    def _run_if_complete(self, job: GenerateJob) -> None:
        if job.confirmed and job.remote is not None and job.remote.first_known:
            self._generates.take_first_token(job)
            job.pull = None
            job.phase = Phase.RUNNING

    def _lose(self, job: GenerateJob, reason: str) -> None:
        assert job.remote is not None
        lease_id = job.remote.lease.lease_id
        self._let_go(job, stuck=reason == TIMEOUT)
        self._parts.emit(PullFailed(job_id=job.job_id, lease_id=lease_id, reason=reason))

    def _let_go(self, job: GenerateJob, *, stuck: bool = False) -> None:
        """Go back to the pinned prefix: no lease, no room."""
        if job.pull is not None:
            quarantined = self._parts.puller.give_up(job.pull, stuck=stuck)
            self._parts.tables.cut(job.sequence, job.pinned_pages, quarantined=quarantined)
        job.pull = job.remote = None
        job.confirmed = False
        job.phase = Phase.HELD
