"""The engine core: takes commands, computes step by step, tells events. Single-threaded, without I/O of its own.

`handle(command)` changes the state and computes nothing. `step()` expires what is over, polls pulls, admits waiting
jobs, computes one batch, and tells what changed.
"""

import time
from collections.abc import Callable

from kvrelay.config import EngineConfig
from kvrelay.engine.admission import Admission
from kvrelay.engine.batches import Batches
from kvrelay.engine.generates import Generates
from kvrelay.engine.jobs import WAITING, GenerateJob, Job, Phase, PrefillJob
from kvrelay.engine.memory import make_agent, make_parts
from kvrelay.engine.pieces import smallest_piece
from kvrelay.engine.pool import PageState
from kvrelay.engine.prefills import Prefills
from kvrelay.engine.prefixes import Prefixes
from kvrelay.engine.protocol import (
    AttachLease,
    BlocksChanged,
    Cancel,
    ClearCache,
    Command,
    ConfirmLease,
    Event,
    ExtendLeases,
    Failed,
    FirstTokenKnown,
    Generate,
    LeasePrefix,
    LeaseReply,
    PiecesReady,
    Prefill,
    ReadLocally,
    ReleaseLeases,
    Started,
    StateChanged,
    Stop,
    Verdict,
)
from kvrelay.engine.remotes import Remotes
from kvrelay.engine.runner import Runner
from kvrelay.engine.tier_setup import open_tiering
from kvrelay.errors import (
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    KvrelayError,
    ResourceExhausted,
    Unavailable,
)
from kvrelay.kv.transfer import Transfer
from kvrelay.types import ReplicaState

STATE_INTERVAL_S = 0.25
"""Half a heartbeat interval: each heartbeat finds a state younger than itself."""
READ_POLL_S = 0.001
"""Between looks at pending READs: a small share of the fastest pull worth making."""
LEASE_CHECK_S = 0.1
"""Between looks at lease deadlines while idle: small beside any time to live."""


class EngineCore:
    """One replica's engine.

    Args:
        config: sizes and bounds.
        runner: computes; its pool is allocated here.
        transfer: this replica's end of the KV network; the pool is registered here.
        replica_id: stable name.
        incarnation: random id of this start.
        clock: monotonic seconds.
        emit: takes events in order; the first is Started, told before the constructor returns.

    Attributes:
        ended: True once nothing more will happen: stopped, or the engine died.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        transfer: Transfer,
        *,
        replica_id: str,
        incarnation: str,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ended = False
        self._runner = runner
        self._transfer = transfer
        self._queue_jobs = config.queue_jobs
        parts, memory = make_parts(config, runner, transfer, incarnation=incarnation, clock=clock, emit=emit)
        self._parts = parts
        self._tiering = open_tiering(config, runner, memory, parts, replica_id=replica_id)
        self._prefixes = Prefixes(parts)
        piece = smallest_piece(config.piece_kib, runner.layout.page_bytes)
        self._prefills = Prefills(parts, self._prefixes, self._tiering, smallest_piece=piece)
        self._generates = Generates(parts, self._prefixes, self._tiering)
        self._remotes = Remotes(parts, self._generates)
        self._batches = Batches(parts, runner, self._prefills, self._generates, config)
        self._admission = Admission(
            parts,
            self._prefills,
            self._generates,
            self._remotes,
            self._tiering,
            max_sequences=config.max_sequences,
        )
        self._told_state: ReplicaState | None = None
        self._told_state_at_s = -STATE_INTERVAL_S
        emit(
            Started(
                agent=make_agent(transfer, memory, runner.layout, replica_id=replica_id, incarnation=incarnation),
                model_fingerprint=runner.model_fingerprint,
                tokenizer_fingerprint=runner.tokenizer_fingerprint,
                context_tokens=runner.context_tokens,
                vocab_size=runner.vocab_size,
                eos_ids=runner.eos_ids,
            )
        )

    def handle(self, command: Command) -> None:
        """Take a command; what is wrong with it is told as an event, never raised."""
        match command:
            case Generate() | Prefill():
                self._submit(command)
            case LeasePrefix() | ExtendLeases() | ConfirmLease():
                self._parts.emit(self._answer(command))
            case ReleaseLeases():
                for lease_id in command.lease_ids:
                    self._parts.stock.release(lease_id)
            case ClearCache():
                self._parts.cache.clear()
                if self._tiering is not None:
                    self._tiering.clear()
            case Stop():
                self._stop()
            case Cancel():
                if (job := self._parts.jobs.get(command.job_id)) is not None:
                    self._drop(job)
            case _:
                self._order(command)
        self._fail_unleased()
        self._tell_blocks()

    def step(self) -> bool:
        """Do what is due and compute one batch; True while there is more to do at once."""
        if self.ended:
            return False
        self._expire()
        self._parts.puller.watch()
        if self._tiering is not None:
            self._tiering.poll()
        for job in list(self._parts.jobs.values()):
            if isinstance(job, GenerateJob) and job.phase is Phase.PULLING:
                self._remotes.poll(job)
            elif job.phase is Phase.FETCHING:
                self._prefixes.poll(job)
        self._admission.admit()
        computed = self._batches.step()
        self.ended = self._batches.broken
        self._tell_blocks()
        self._tell_state(idle=not computed)
        return computed and not self.ended

    def next_wake_s(self) -> float:
        """Return how long nothing is due unless a command comes, s; infinite when nothing ever is."""
        jobs = self._parts.jobs.values()
        reading = any(pull.pending for job in jobs for pull in job.pulls())
        moving = self._tiering is not None and self._tiering.busy
        if reading or moving or self._parts.puller.watching:
            return READ_POLL_S
        now_s = self._parts.clock()
        deadline_s = min((job.deadline_at_s - now_s for job in jobs), default=float("inf"))
        return max(min(deadline_s, LEASE_CHECK_S if len(self._parts.stock) else float("inf")), 0.0)

    def close(self) -> None:
        """Give pool, weights and transport back."""
        self._transfer.close()
        if self._tiering is None or self._tiering.close():
            self._runner.close()  # otherwise the pool's memory is in use still, and ends with the process

    def check_integrity(self) -> None:
        """Prove that pages, leases and jobs agree."""
        self._parts.pool.check_integrity()
        self._parts.cache.check_integrity()
        jobs = self._parts.jobs.values()
        assert self._parts.pool.reserved == sum(job.sequence.reserved for job in jobs)
        active = {page for job in jobs for page in job.sequence.pages}
        if self._tiering is not None:
            active |= self._tiering.pinned
        assert self._parts.pool.count(PageState.ACTIVE) == len(active)
        assert self._parts.puller.quarantined_pages == self._parts.pool.count(PageState.QUARANTINED)

    # ------------------------------------------------------------ commands

    def _submit(self, command: Generate | Prefill) -> None:
        try:
            if command.job_id in self._parts.jobs:
                raise InvalidArgument("job_id", f"{command.job_id} is running already")
            if self._waiting() >= self._queue_jobs:
                raise ResourceExhausted(f"{self._queue_jobs} jobs are waiting; try again or elsewhere")
            if isinstance(command, Prefill):
                self._prefills.submit(command)
            else:
                self._generates.submit(command)
        except KvrelayError as error:
            self._parts.emit(Failed(job_id=command.job_id, error=error))

    def _order(self, command: AttachLease | PiecesReady | FirstTokenKnown | Verdict | ReadLocally) -> None:
        job = self._parts.jobs.get(command.job_id)
        if job is not None and job.phase is Phase.FETCHING:
            self._prefixes.order(job, command)
            return
        if not isinstance(job, GenerateJob):
            return  # it has ended meanwhile
        if job.phase is Phase.LOADING and not isinstance(command, FirstTokenKnown):
            return  # it reads its prompt here, and has its orders
        match command:
            case AttachLease():
                self._remotes.attach(job, command)
            case PiecesReady():
                self._remotes.pieces_ready(job, command)
            case FirstTokenKnown():
                self._remotes.first_token_known(job, command)
            case Verdict():
                self._remotes.verdict(job, command)
            case ReadLocally():
                self._remotes.read_locally(job)

    def _answer(self, command: LeasePrefix | ExtendLeases | ConfirmLease) -> LeaseReply:
        try:
            match command:
                case LeasePrefix():
                    return self._parts.stock.lease_prefix(command)
                case ExtendLeases():
                    return self._parts.stock.extend(command)
                case ConfirmLease():
                    return self._parts.stock.confirm(command)
        except KvrelayError as error:
            ended = command.lease_ids if isinstance(command, ExtendLeases) else ()
            reason = "stock_bound" if isinstance(error, ResourceExhausted) else "not_held"
            return LeaseReply(call_id=command.call_id, ended=ended, reason=reason)

    def _stop(self) -> None:
        for job in list(self._parts.jobs.values()):
            self._fail(job, Draining("the replica is shutting down; try another"))
        self.ended = True

    # ------------------------------------------------------------ time

    def _expire(self) -> None:
        now_s = self._parts.clock()
        for job in [job for job in self._parts.jobs.values() if job.deadline_at_s <= now_s]:
            self._fail(job, DeadlineExceeded("the request's deadline passed before its answer was complete"))
        self._parts.stock.expire()
        self._fail_unleased()

    def _fail_unleased(self) -> None:
        """End prefill jobs whose lease has ended: nobody will pull what they compute."""
        ended = self._parts.stock.take_ended()
        if not ended:
            return
        for job in list(self._parts.jobs.values()):
            if isinstance(job, PrefillJob) and job.lease is not None and job.lease.lease_id in ended:
                self._fail(job, Unavailable("the lease ended while the prompt was read; extend leases in time"))

    # ------------------------------------------------------------ jobs of either kind

    def _drop(self, job: Job) -> None:
        if isinstance(job, PrefillJob):
            self._prefills.drop(job)
        elif isinstance(job, GenerateJob):
            self._generates.drop(job)

    def _fail(self, job: Job, error: KvrelayError) -> None:
        self._drop(job)
        self._parts.emit(Failed(job_id=job.job_id, error=error))

    def _waiting(self) -> int:
        return sum(job.phase in WAITING for job in self._parts.jobs.values())

    # ------------------------------------------------------------ telling

    def _tell_blocks(self) -> None:
        added, removed = self._parts.cache.changes.take()
        if added or removed:
            self._parts.emit(BlocksChanged(added=added, removed=removed))

    def _tell_state(self, *, idle: bool) -> None:
        now_s = self._parts.clock()
        if not idle and now_s - self._told_state_at_s < STATE_INTERVAL_S:
            return
        state = self._state()
        if state == self._told_state:
            return
        self._told_state, self._told_state_at_s = state, now_s
        self._parts.emit(StateChanged(state=state))

    def _state(self) -> ReplicaState:
        pool, jobs = self._parts.pool, list(self._parts.jobs.values())
        # Jobs that wait for a lease, for room or for READs make no steps: they are no sign of a stuck engine.
        running = [job for job in jobs if job.phase is Phase.RUNNING]
        unread = [job.sequence.remaining for job in jobs if not job.work().decoding]
        speed = self._parts.speed
        return ReplicaState(
            steps=self._batches.steps,
            running=len(running),
            waiting=len(jobs) - len(running),
            pages_free=pool.count(PageState.FREE) + pool.count(PageState.CACHED),
            pages_total=pool.total,
            pages_quarantined=pool.count(PageState.QUARANTINED),
            leases=len(self._parts.stock),
            prefill_tokens=sum(unread),
            decode_tokens=sum(job.sequence.computed for job in running),
            prefill_tokens_per_s=speed.prefill_tokens_per_s,
            step_s=speed.step_s,
        )
