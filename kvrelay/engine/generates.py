"""Generate jobs: answers written here, from prompts read here or pulled from another replica."""

from kvrelay.engine.intake import check_token, read_limits, read_sampling, read_sequence
from kvrelay.engine.jobs import GenerateJob, Phase
from kvrelay.engine.parts import Parts
from kvrelay.engine.prefixes import Prefixes
from kvrelay.engine.protocol import Ended, Failed, Generate, Held, Tokens
from kvrelay.engine.runner import Drawn
from kvrelay.engine.tiering import Tiering
from kvrelay.errors import KvrelayError
from kvrelay.types import FinishReason


class Generates:
    """What local and remote prompts have in common: taking in, room, tokens, the end."""

    def __init__(self, parts: Parts, prefixes: Prefixes, tiering: Tiering | None) -> None:
        self._parts = parts
        self._prefixes = prefixes
        self._tiering = tiering

    def submit(self, command: Generate) -> None:
        """Take a job in and tell what of its prefix is held.

        Raises:
            InvalidArgument: names the field and the limit.
        """
        facts = self._parts.facts
        sampling = read_sampling(command.sampling, command.job_id)
        check_token("forced_next", command.forced_next, facts)
        job = GenerateJob(
            job_id=command.job_id,
            sequence=read_sequence(command.prompt, facts),
            sampling=sampling,
            limits=read_limits(sampling, facts),
            priority=command.priority,
            arrived_at_s=self._parts.clock(),
            deadline_at_s=command.deadline_at_s,
            first_token=command.forced_next,
        )
        job.usage.prompt_tokens = job.sequence.prompt_tokens
        self._parts.jobs[job.job_id] = job
        asks_others = command.remote or command.prefix_tokens
        if self._tiering is None or not asks_others or not self._tiering.load(job, lambda: self._begin(job, command)):
            self._begin(job, command)

    def _begin(self, job: GenerateJob, command: Generate) -> None:
        tables, prefix_s = self._parts.tables, None
        job.phase = Phase.HELD if command.remote else Phase.QUEUED
        if command.remote:
            tables.pin(job.sequence)
        else:
            prefix_s = self._prefixes.wait(job, command.prefix_tokens)
        held_tokens = job.sequence.computed if job.phase is not Phase.QUEUED else tables.held_tokens(job.sequence)
        self._parts.emit(Held(job_id=job.job_id, tokens=held_tokens, prefix_s=prefix_s))
        if job.sequence.output_tokens and self.end_if_complete(job):
            return
        if job.first_token is not None and not self.end_with(job, job.first_token) and not command.remote:
            self.take_first_token(job)

    def reserve(self, job: GenerateJob) -> bool:
        """Set room aside for the whole expected sequence; False when there is none."""
        tokens = max(job.limits.most_tokens(job.sequence.prompt_tokens), len(job.sequence.ids))
        return self._parts.tables.admit(job.sequence, tokens)

    def admit_local(self, job: GenerateJob) -> bool:
        """Let a queued job read its prompt here; False when there is no room."""
        if self._tiering is not None and self._tiering.load(job, lambda: self._requeue(job)):
            return True
        if not self.reserve(job):
            return False
        self._count_cached(job)
        job.phase = Phase.RUNNING
        return True

    def _requeue(self, job: GenerateJob) -> None:
        job.phase = Phase.QUEUED
        if job.first_token is not None:
            self.take_first_token(job)  # it became known meanwhile

    def _count_cached(self, job: GenerateJob) -> None:
        usage, fetch = job.usage, job.fetch
        cached = min(job.sequence.computed, job.sequence.prompt_tokens)
        # What a lost attempt left in the cache counts as cached now.
        usage.prefill_cached_tokens = usage.prefill_pulled_tokens = usage.prefill_pulled_bytes = 0
        usage.pulled_tokens = 0 if fetch is None else fetch.tokens_within(cached)
        usage.cached_tokens = cached - usage.pulled_tokens
        if fetch is not None and fetch.stats is not None:
            stats = fetch.stats
            usage.pulled_bytes, usage.pull_s, usage.pull_descriptors = stats.bytes, stats.busy_s, stats.descriptors

    def advance(self, job: GenerateJob, tokens: int, drawn: Drawn | None) -> None:
        """Take note that a step computed `tokens` more tokens of the job, and perhaps drew the next one."""
        sequence = job.sequence
        of_prompt = min(tokens, max(sequence.prompt_tokens - sequence.computed, 0))
        job.usage.decode_computed_tokens += of_prompt
        job.usage.computed_tokens += of_prompt
        sequence.computed += tokens
        self._parts.tables.publish(sequence)
        if drawn is None:
            return
        logprobs = () if drawn.logprobs is None else (drawn.logprobs,)
        self._parts.emit(Tokens(job_id=job.job_id, position=len(sequence.ids), ids=(drawn.token,), logprobs=logprobs))
        sequence.ids.append(drawn.token)
        self.end_if_complete(job)

    # ------------------------------------------------------------ tokens that were told before

    def take_first_token(self, job: GenerateJob) -> None:
        """Put the token that the client has already at the sequence's end."""
        assert job.first_token is not None
        job.sequence.ids.append(job.first_token)
        job.first_token = None

    def end_with(self, job: GenerateJob, token: int) -> bool:
        """End the job if `token`, coming next, completes the answer."""
        job.sequence.ids.append(token)
        if self.end_if_complete(job):
            return True
        job.sequence.ids.pop()
        return False

    # ------------------------------------------------------------ ends

    def end_if_complete(self, job: GenerateJob) -> bool:
        """End the job if its newest token completes the answer."""
        reason = job.limits.finish_reason(job.sequence)
        if reason is None:
            return False
        job.usage.output_tokens = job.sequence.output_tokens
        stop_id = job.sequence.ids[-1] if reason is FinishReason.STOP else None
        self.drop(job)
        self._parts.emit(Ended(job_id=job.job_id, reason=reason, usage=job.usage, stop_id=stop_id))
        return True

    def drop(self, job: GenerateJob) -> None:
        """Free what the job holds; pages that READs may still write go into quarantine."""
        del self._parts.jobs[job.job_id]
        quarantined = frozenset[int]().union(*(self._parts.puller.give_up(pull) for pull in job.pulls()))
        self._parts.tables.cut(job.sequence, 0, quarantined=quarantined)

    def fail(self, job: GenerateJob, error: KvrelayError) -> None:
        """End the job with an error."""
        self.drop(job)
        self._parts.emit(Failed(job_id=job.job_id, error=error))
