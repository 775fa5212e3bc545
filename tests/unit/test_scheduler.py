from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.scheduler import AGEING_S, Work, in_order, pick_batch


def works_strategy():
    return st.lists(
        st.builds(
            Work,
            job_id=st.uuids().map(str),
            remaining=st.integers(1, 100),
            priority=st.integers(-3, 3),
            arrived_at_s=st.floats(0, 50),
            deadline_at_s=st.floats(60, 100),
        ),
        max_size=12,
    ).map(lambda works: [_decode(work) if i % 3 == 0 else work for i, work in enumerate(works)])


def _decode(work):
    return Work(job_id=work.job_id, remaining=1, decoding=True, priority=work.priority)


@given(works_strategy(), st.integers(1, 64), st.integers(1, 4))
def test_a_batch_keeps_its_bounds_and_wastes_nothing(works, chunk_tokens, max_sequences):
    batch = pick_batch(works, chunk_tokens=chunk_tokens, max_sequences=max_sequences, now_s=60.0)
    by_id = {work.job_id: work for work in works}
    decodes = [chunk for chunk in batch if by_id[chunk.job_id].decoding]
    prompts = [chunk for chunk in batch if not by_id[chunk.job_id].decoding]
    assert len({chunk.job_id for chunk in batch}) == len(batch)
    assert all(1 <= chunk.length <= by_id[chunk.job_id].remaining for chunk in batch)
    assert len(decodes) == min(sum(work.decoding for work in works), max_sequences)
    unread = sum(work.remaining for work in works if not work.decoding)
    assert sum(chunk.length for chunk in prompts) == min(unread, chunk_tokens)


def order(*works, now_s=100.0):
    return [work.job_id for work in in_order(works, now_s)]


def test_priority_comes_before_deadline_and_length():
    high = Work(job_id="high", remaining=99, priority=1, arrived_at_s=100.0)
    urgent = Work(job_id="urgent", remaining=50, arrived_at_s=100.0, deadline_at_s=101.0)
    short = Work(job_id="short", remaining=1, arrived_at_s=100.0)
    long = Work(job_id="long", remaining=2, arrived_at_s=100.0)
    assert order(long, short, urgent, high) == ["high", "urgent", "short", "long"]


def test_prompts_that_are_ready_elsewhere_come_before_those_that_are_not():
    ready = Work(job_id="ready", remaining=99, arrived_at_s=100.0)
    computing = Work(job_id="computing", remaining=1, arrived_at_s=100.0, ready=False)
    assert order(computing, ready) == ["ready", "computing"]


def test_waiting_lifts_a_job_over_higher_priorities():
    old = Work(job_id="old", remaining=99, arrived_at_s=100.0 - 3 * AGEING_S)
    young = Work(job_id="young", remaining=1, priority=2, arrived_at_s=100.0)
    assert order(young, old) == ["old", "young"]


def test_a_long_prompt_leaves_room_for_decodes_and_takes_the_rest_of_the_step():
    works = [Work(job_id="long", remaining=1000, priority=9), Work(job_id="running", remaining=1, decoding=True)]
    batch = pick_batch(works, chunk_tokens=64, max_sequences=8, now_s=0.0)
    assert [(chunk.job_id, chunk.length) for chunk in batch] == [("running", 1), ("long", 64)]
