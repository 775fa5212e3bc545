"""The mailbox of one job."""

import asyncio

import pytest

from kvrelay.engine.protocol import Ended, Failed, FirstToken, Held, PiecesFinal, Tokens
from kvrelay.errors import InternalError, Unavailable
from kvrelay.replica.channel import CHANNEL_ENTRIES_MAX, JobChannel
from kvrelay.types import FinishReason, TokenLogprobs, Usage

TIMEOUT_S = 5.0


def tokens(position: int, *ids: int, logprobs: tuple[TokenLogprobs, ...] = ()) -> Tokens:
    return Tokens(job_id="job", position=position, ids=ids, logprobs=logprobs)


async def test_events_come_out_in_the_order_they_were_posted():
    channel = JobChannel("job")
    channel.post(Held(job_id="job", tokens=32))
    channel.post(tokens(40, 7))
    channel.post(Ended(job_id="job", reason=FinishReason.LENGTH, usage=Usage()))
    kinds = [type(await channel.get(timeout_s=TIMEOUT_S)) for _ in range(3)]
    assert kinds == [Held, Tokens, Ended]
    assert channel.ended


async def test_tokens_that_nobody_reads_become_one_entry_and_lose_nothing():
    channel = JobChannel("job")
    count = 10_000
    for i in range(count):
        channel.post(tokens(100 + i, i, logprobs=(TokenLogprobs(-float(i)),)))
    assert len(channel) == 1
    event = await channel.get(timeout_s=TIMEOUT_S)
    assert event.position == 100
    assert event.ids == tuple(range(count))
    assert [each.logprob for each in event.logprobs] == [-float(i) for i in range(count)]


async def test_tokens_that_leave_a_gap_are_not_merged():
    channel = JobChannel("job")
    channel.post(tokens(100, 1))
    channel.post(tokens(102, 2))
    assert (await channel.get(timeout_s=TIMEOUT_S)).position == 100
    assert (await channel.get(timeout_s=TIMEOUT_S)).position == 102


async def test_the_newest_piece_event_stands_for_those_before_it():
    channel = JobChannel("job")
    for pages in range(1, 500):
        channel.post(PiecesFinal(job_id="job", lease_id="a", pages=pages, all=pages == 499))
    assert len(channel) == 1
    event = await channel.get(timeout_s=TIMEOUT_S)
    assert (event.pages, event.all) == (499, True)


async def test_a_failed_job_raises_its_error_after_what_was_told_before():
    channel = JobChannel("job")
    channel.post(tokens(5, 1))
    channel.post(Failed(job_id="job", error=Unavailable("gone")))
    assert (await channel.get(timeout_s=TIMEOUT_S)).ids == (1,)
    with pytest.raises(Unavailable, match="gone"):
        await channel.get(timeout_s=TIMEOUT_S)
    assert channel.ended


async def test_the_end_of_another_job_in_the_same_mailbox_is_an_event_like_any_other():
    channel = JobChannel("job")
    channel.post(Failed(job_id="leg", error=Unavailable("peer")))
    assert isinstance(await channel.get(timeout_s=TIMEOUT_S), Failed)
    channel.post(FirstToken(job_id="leg", position=1, token=2, computed_tokens=1, compute_s=0.0))
    assert isinstance(await channel.get(timeout_s=TIMEOUT_S), FirstToken)
    assert not channel.ended


async def test_waiting_for_an_event_ends_at_its_deadline():
    with pytest.raises(TimeoutError):
        await JobChannel("job").get(timeout_s=0.01)


async def test_a_waiting_reader_is_woken():
    channel = JobChannel("job")
    reader = asyncio.create_task(channel.get(timeout_s=TIMEOUT_S))
    await asyncio.sleep(0)
    channel.post(tokens(1, 2))
    assert (await reader).ids == (2,)


async def test_an_overflowing_mailbox_fails_its_job_instead_of_growing():
    channel = JobChannel("job")
    for i in range(10 * CHANNEL_ENTRIES_MAX):
        channel.post(tokens(2 * i, i))
        assert len(channel) <= CHANNEL_ENTRIES_MAX

    async def read_all():
        while True:
            await channel.get(timeout_s=TIMEOUT_S)

    with pytest.raises(InternalError):
        await read_all()
