"""Decides what the next step computes and which waiting job comes next. Pure: values in, values out."""

from collections.abc import Iterable
from dataclasses import dataclass

AGEING_S = 5.0
"""Waiting this long lifts a job by one priority: long enough that priorities mean something, short enough that a job
of the default priority overtakes a steady stream of slightly higher ones within a request's patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job that could use the next step, or that waits for room.

    Attributes:
        job_id: whose work it is.
        remaining: tokens to compute until the sequence's end.
        decoding: True when only its newest token is left to compute.
        ready: False while a remote prompt is still being computed elsewhere.
        priority: higher first.
        arrived_at_s: when it came; ageing counts from here.
        deadline_at_s: end of the caller's patience.
    """

    job_id: str
    remaining: int
    decoding: bool = False
    ready: bool = True
    priority: int = 0
    arrived_at_s: float = 0.0
    deadline_at_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `length` tokens of a job in the next step."""

    job_id: str
    length: int


def rank(work: Work, now_s: float) -> tuple[float, bool, float, int, float]:
    """Return the sort key of a job, smallest first.

    Priority (with ageing) comes first, then those whose KV is ready, then the earlier deadline, then the shorter job,
    then the older one.
    """
    aged = work.priority + int((now_s - work.arrived_at_s) / AGEING_S)
    return (-aged, not work.ready, work.deadline_at_s, work.remaining, work.arrived_at_s)


def in_order(works: Iterable[Work], now_s: float) -> list[Work]:
    """Return jobs in the order in which they are served."""
    return sorted(works, key=lambda work: rank(work, now_s))


def pick_batch(works: Iterable[Work], *, chunk_tokens: int, max_sequences: int, now_s: float) -> list[Chunk]:
    """Choose the next step: decodes first, one token each, then prompts up to `chunk_tokens` in all.

    Decoding never waits for prompts, and a long prompt holds up running answers by at most one chunk.
    """
    ordered = in_order(works, now_s)
    batch = [Chunk(work.job_id, 1) for work in ordered if work.decoding][:max_sequences]
    left = chunk_tokens
    for work in ordered:
        if work.decoding:
            continue
        if not left:
            break
        length = min(work.remaining, left)
        batch.append(Chunk(work.job_id, length))
        left -= length
    return batch
