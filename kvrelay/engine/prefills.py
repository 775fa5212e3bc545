"""Prefill jobs: prompts read here, leased to others."""

import math

from kvrelay.engine.intake import check_held, check_token, read_limits, read_sampling, read_sequence
from kvrelay.engine.jobs import Phase, PrefillJob
from kvrelay.engine.parts import Parts
from kvrelay.engine.pieces import pages_to_tell
from kvrelay.engine.prefixes import Prefixes
from kvrelay.engine.protocol import Failed, FirstToken, Granted, Held, LeaseGrant, PiecesFinal, Prefill
from kvrelay.engine.runner import Drawn
from kvrelay.engine.tiering import Tiering
from kvrelay.errors import InvalidArgument, KvrelayError


class Prefills:
    """The life of prefill jobs: queued → granted → pieces final → first token."""

    def __init__(self, parts: Parts, prefixes: Prefixes, tiering: Tiering | None, *, smallest_piece: int) -> None:
        """`smallest_piece` is the fewest pages worth announcing before the prompt is complete."""
        self._parts = parts
        self._prefixes = prefixes
        self._tiering = tiering
        self._smallest_piece = smallest_piece

    def submit(self, command: Prefill) -> None:
        """Take a job in.

        Raises:
            InvalidArgument: names the field and the limit.
        """
        facts = self._parts.facts
        sampling = read_sampling(command.sampling, command.job_id)
        check_token("forced_next", command.forced_next, facts)
        if not (math.isfinite(command.lease_ttl_s) and command.lease_ttl_s > 0):
            raise InvalidArgument("lease_ttl_s", f"{command.lease_ttl_s} is not a positive time in seconds")
        sequence = read_sequence(command.prompt, facts)
        limits = read_limits(sampling, facts)
        if sequence.output_tokens and limits.finish_reason(sequence):
            raise InvalidArgument("output_ids", "the answer is complete; nothing is left to write")
        check_held(command.held_tokens, sequence, facts)
        job = PrefillJob(
            job_id=command.job_id,
            sequence=sequence,
            sampling=sampling,
            limits=limits,
            priority=command.priority,
            arrived_at_s=self._parts.clock(),
            deadline_at_s=command.deadline_at_s,
            held_tokens=command.held_tokens,
            lease_ttl_s=command.lease_ttl_s,
            forced_next=command.forced_next,
        )
        self._parts.jobs[command.job_id] = job
        asks_others = command.prefix_tokens
        if self._tiering is None or not asks_others or not self._tiering.load(job, lambda: self._begin(job, command)):
            self._begin(job, command)

    def _begin(self, job: PrefillJob, command: Prefill) -> None:
        job.phase = Phase.QUEUED
        prefix_s = self._prefixes.wait(job, command.prefix_tokens)
        if prefix_s is not None:
            self._parts.emit(Held(job_id=job.job_id, tokens=job.sequence.computed, prefix_s=prefix_s))

    def _requeue(self, job: PrefillJob) -> None:
        job.phase = Phase.QUEUED

    def admit(self, job: PrefillJob) -> bool:
        """Give a queued job all its pages at once and lease them; False when stock or pool have no room.

        Raises:
            ResourceExhausted: there are too many leases.
        """
        tables, sequence = self._parts.tables, job.sequence
        tokens, held_pages = len(sequence.ids), tables.pages_for(job.held_tokens)
        if not self._parts.stock.takes(tables.pages_for(tokens) - held_pages):
            return False
        if self._tiering is not None and self._tiering.load(job, lambda: self._requeue(job)):
            return True
        if not tables.admit(sequence, tokens):
            return False
        tables.grow(sequence, tokens)
        job.phase = Phase.RUNNING
        job.cached_tokens = sequence.computed
        job.predicted_s = self._parts.speed.compute_s(sequence.computed, tokens, chunk_tokens=self._parts.chunk_tokens)
        job.lease = self._parts.stock.grant(
            sequence.pages[held_pages:],
            first_position=job.held_tokens,
            tokens=tokens - job.held_tokens,
            ttl_s=job.lease_ttl_s,
        )
        sequence.leased_from = held_pages
        queue_s = self._parts.clock() - job.arrived_at_s
        self._parts.emit(self._granted(job, job.lease, queue_s))
        self._tell_final(job)
        return True

    def advance(self, job: PrefillJob, tokens: int, drawn: Drawn | None, elapsed_s: float) -> None:
        """Take note that a step computed `tokens` more tokens of the job."""
        job.sequence.computed += tokens
        job.compute_s += elapsed_s
        self._parts.tables.publish(job.sequence)
        self._tell_final(job)
        if not job.sequence.remaining:
            self._finish(job, Drawn(job.forced_next) if job.forced_next is not None else drawn)

    def drop(self, job: PrefillJob) -> None:
        """Free what the job holds, its lease included."""
        del self._parts.jobs[job.job_id]
        quarantined = frozenset[int]().union(*(self._parts.puller.give_up(pull) for pull in job.pulls()))
        self._parts.tables.cut(job.sequence, 0, quarantined=quarantined)
        if job.lease is not None:
            self._parts.stock.release(job.lease.lease_id)

    def fail(self, job: PrefillJob, error: KvrelayError) -> None:
        """End the job with an error."""
        self.drop(job)
        self._parts.emit(Failed(job_id=job.job_id, error=error))

    def _granted(self, job: PrefillJob, lease: LeaseGrant, queue_s: float) -> Granted:
        fetch = job.fetch
        pulled_tokens = 0 if fetch is None else fetch.tokens_within(job.cached_tokens)
        return Granted(
            job_id=job.job_id,
            lease=lease,
            cached_tokens=job.cached_tokens - pulled_tokens,
            queue_s=queue_s,
            pulled_tokens=pulled_tokens,
            pulled_bytes=0 if fetch is None or fetch.stats is None else fetch.stats.bytes,
        )

    def _finish(self, job: PrefillJob, drawn: Drawn | None) -> None:
        assert drawn is not None
        assert job.lease is not None
        sequence = job.sequence
        position = len(sequence.ids)
        sequence.ids.append(drawn.token)
        reason = job.limits.finish_reason(sequence)
        del self._parts.jobs[job.job_id]
        self._parts.tables.cut(sequence, 0)
        if reason is not None:
            # Nothing follows the first token, so nobody needs the KV.
            self._parts.stock.release(job.lease.lease_id)
        self._parts.emit(
            FirstToken(
                job_id=job.job_id,
                position=position,
                token=drawn.token,
                logprobs=drawn.logprobs,
                finish_reason=reason,
                computed_tokens=position - job.cached_tokens,
                compute_s=job.compute_s,
                predicted_s=job.predicted_s,
            )
        )

    def _tell_final(self, job: PrefillJob) -> None:
        assert job.lease is not None
        sequence = job.sequence
        every = not sequence.remaining
        held_pages = self._parts.tables.pages_for(job.held_tokens)
        full_pages = sequence.computed // self._parts.tables.page_tokens - held_pages
        total = len(job.lease.pages)
        pages = pages_to_tell(
            final=total if every else full_pages, told=job.told_pages, total=total, smallest=self._smallest_piece
        )
        if pages <= job.told_pages:
            return
        job.told_pages = pages
        self._parts.emit(PiecesFinal(job_id=job.job_id, lease_id=job.lease.lease_id, pages=pages, all=every))
