"""Gives waiting jobs their room, in order, and sees to it that room never waits for itself."""

from kvrelay.engine.generates import Generates
from kvrelay.engine.jobs import WAITING, GenerateJob, Job, Phase, PrefillJob
from kvrelay.engine.parts import Parts
from kvrelay.engine.pool import PageState
from kvrelay.engine.prefills import Prefills
from kvrelay.engine.remotes import Remotes
from kvrelay.engine.scheduler import in_order
from kvrelay.engine.tiering import Tiering
from kvrelay.errors import KvrelayError


class Admission:
    """Admits queued jobs.

    Within a kind of job nobody overtakes: the next in order waits until there is room for it, so that large jobs get
    their turn. The kinds do not wait for each other: prefill jobs wait for the stock, answers for sequences and room.
    """

    def __init__(
        self,
        parts: Parts,
        prefills: Prefills,
        generates: Generates,
        remotes: Remotes,
        tiering: Tiering | None,
        *,
        max_sequences: int,
    ) -> None:
        self._parts = parts
        self._prefills = prefills
        self._generates = generates
        self._remotes = remotes
        self._tiering = tiering
        self._max_sequences = max_sequences

    def admit(self) -> None:
        """Admit as many queued jobs as there is room for."""
        jobs = self._parts.jobs
        queued = [job.work() for job in jobs.values() if job.phase is Phase.QUEUED]
        if not queued:
            return
        blocked: dict[type[Job], Job] = {}
        for work in in_order(queued, self._parts.clock()):
            job = jobs[work.job_id]
            if job.phase is Phase.QUEUED and type(job) not in blocked and not self._admit(job):
                blocked[type(job)] = job
        for job in blocked.values():
            self._make_way(job)

    def _admit(self, job: Job) -> bool:
        """Admit one job; False when it must wait. A job that can never run fails here."""
        if isinstance(job, PrefillJob):
            try:
                return self._prefills.admit(job)
            except KvrelayError as error:
                self._prefills.fail(job, error)
                return True
        assert isinstance(job, GenerateJob)
        if self._sequences() >= self._max_sequences:
            return False
        return self._generates.admit_local(job) if job.remote is None else self._remotes.admit(job)

    def _sequences(self) -> int:
        return sum(isinstance(job, GenerateJob) and job.phase not in WAITING for job in self._parts.jobs.values())

    def _make_way(self, blocked: Job) -> None:
        """Take pinned prefixes from waiting jobs, last in order first, when nothing else will ever free room.

        Waiting jobs pin prefixes and nothing more. With nothing running, moving, leased or in quarantine, only these
        pins can be what keeps the next job from its room.
        """
        if not self._only_pins_are_left():
            return
        pinned = [job for job in self._parts.jobs.values() if isinstance(job, GenerateJob) and job is not blocked]
        works = in_order((job.work() for job in pinned if job.sequence.pages), self._parts.clock())
        for work in reversed(works):
            job = self._parts.jobs[work.job_id]
            assert isinstance(job, GenerateJob)
            self._remotes.unpin(job)
            if self._admit(blocked):
                return

    def _only_pins_are_left(self) -> bool:
        pool = self._parts.pool
        busy = any(job.phase not in (Phase.HELD, Phase.QUEUED) for job in self._parts.jobs.values())
        moving = self._tiering is not None and self._tiering.busy
        return not (busy or moving or len(self._parts.stock) or pool.count(PageState.QUARANTINED))
