"""Runs one step: builds the batch, computes it, and hands the results to the jobs."""

import logging
import traceback
from dataclasses import dataclass

from kvrelay.config import EngineConfig
from kvrelay.engine.generates import Generates
from kvrelay.engine.jobs import GenerateJob, Job, Phase, PrefillJob
from kvrelay.engine.parts import Parts
from kvrelay.engine.prefills import Prefills
from kvrelay.engine.protocol import EngineDied
from kvrelay.engine.runner import Drawn, Runner, Slice
from kvrelay.engine.scheduler import Chunk, pick_batch
from kvrelay.engine.speed import attended_by
from kvrelay.errors import InternalError

log = logging.getLogger(__name__)

FAILED_STEPS_MAX = 3
"""Steps in a row that may fail before the engine gives up: one can be a bad input, three are a broken engine."""


@dataclass(slots=True)
class Member:
    """A job in a batch."""

    job: Job
    tokens: int
    decoding: bool


class Batches:
    """Computes steps.

    Attributes:
        steps: steps since start.
        broken: True when steps keep failing; EngineDied was told.
    """

    def __init__(
        self, parts: Parts, runner: Runner, prefills: Prefills, generates: Generates, config: EngineConfig
    ) -> None:
        self.steps = 0
        self.broken = False
        self._parts = parts
        self._runner = runner
        self._prefills = prefills
        self._generates = generates
        self._chunk_tokens = config.chunk_tokens
        self._max_sequences = config.max_sequences
        self._failed_steps = 0

    def step(self) -> bool:
        """Compute one batch; False when there is nothing to compute."""
        batch = self._pick()
        if not batch:
            return False
        slices = [self._slice(member) for member in batch]
        started_s = self._parts.clock()
        try:
            drawn = self._runner.run(slices)
        except Exception as error:  # noqa: BLE001 - whatever a model raises, other jobs go on
            self._fail(batch, error)
            return True
        elapsed_s = self._parts.clock() - started_s
        self.steps += 1
        self._failed_steps = 0
        self._note_speed([member for member in batch if not member.decoding], elapsed_s)
        for member, token in zip(batch, drawn, strict=True):
            self._advance(member, token, elapsed_s)
        return True

    def _note_speed(self, reading: list[Member], elapsed_s: float) -> None:
        starts = [(member.job.sequence.computed, member.tokens) for member in reading]
        self._parts.speed.add(
            prompt_tokens=sum(tokens for _, tokens in starts),
            attended=sum(attended_by(start, start + tokens) for start, tokens in starts),
            elapsed_s=elapsed_s,
        )

    def _pick(self) -> list[Member]:
        running = {job_id: job for job_id, job in self._parts.jobs.items() if job.phase is Phase.RUNNING}
        works = [job.work() for job in running.values()]
        chunks = pick_batch(
            works,
            chunk_tokens=self._chunk_tokens,
            max_sequences=self._max_sequences,
            now_s=self._parts.clock(),
        )
        return [self._member(running[chunk.job_id], chunk) for chunk in chunks]

    def _member(self, job: Job, chunk: Chunk) -> Member:
        return Member(job, chunk.length, job.work().decoding)

    def _slice(self, member: Member) -> Slice:
        sequence = member.job.sequence
        end = sequence.computed + member.tokens
        self._parts.tables.grow(sequence, end)
        self._parts.tables.check_writable(sequence, member.tokens)
        return Slice(
            ids=sequence.ids,
            start=sequence.computed,
            length=member.tokens,
            pages=sequence.pages,
            draw=member.job.draw() if end == len(sequence.ids) else None,
        )

    def _advance(self, member: Member, drawn: Drawn | None, elapsed_s: float) -> None:
        if isinstance(member.job, PrefillJob):
            self._prefills.advance(member.job, member.tokens, drawn, elapsed_s)
        else:
            assert isinstance(member.job, GenerateJob)
            self._generates.advance(member.job, member.tokens, drawn)

    def _fail(self, batch: list[Member], error: Exception) -> None:
        log.error("step_failed", exc_info=error, extra={"jobs": [member.job.job_id for member in batch]})
        for member in batch:
            told = InternalError("the model failed while computing this request; the replica's log tells why")
            if isinstance(member.job, PrefillJob):
                self._prefills.fail(member.job, told)
            elif isinstance(member.job, GenerateJob):
                self._generates.fail(member.job, told)
        self._failed_steps += 1
        if self._failed_steps >= FAILED_STEPS_MAX:
            self.broken = True
            died = InternalError(f"{self._failed_steps} steps in a row failed; restart the replica")
            self._parts.emit(EngineDied(error=died, detail="".join(traceback.format_exception(error))))
