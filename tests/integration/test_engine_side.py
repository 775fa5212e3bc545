"""The engine behind its two queues, in a thread and in a process, with the mock runner and real NIXL."""

import os
import signal
import time

import pytest

from kvrelay.config import EngineConfig
from kvrelay.engine import loop
from kvrelay.engine.protocol import (
    Cancel,
    Ended,
    EngineDied,
    Failed,
    Generate,
    Held,
    Prompt,
    Started,
    StateChanged,
    Tokens,
)
from kvrelay.engine.side import COMMANDS_MAX, ThreadSide, start_engine
from kvrelay.errors import InternalError, ResourceExhausted, Unavailable
from kvrelay.kv.keys import block_keys, root_key
from kvrelay.types import Sampling, pack_ids

START_TIMEOUT_S = 60.0
"""Ten times what a spawned interpreter and NIXL take on a busy machine."""


def config(side, **options):
    return EngineConfig(**{"engine": "mock", "kv_mib": 4, "engine_side": side} | options)


def prompt(count):
    root, ids = root_key(model_fingerprint="m", tokenizer_fingerprint="t", block_tokens=32), pack_ids([5] * count)
    return Prompt(prompt_ids=ids, root_key=root, block_keys=block_keys(root, ids, 32))


def generate(job_id="a", max_tokens=20):
    return Generate(job_id=job_id, prompt=prompt(70), sampling=Sampling(max_tokens=max_tokens))


def receive_until(side, found, timeout_s=START_TIMEOUT_S):
    events = []
    end = time.monotonic() + timeout_s
    while not any(found(event) for event in events):
        assert time.monotonic() < end, events
        events += side.receive(0.5)
    return events


@pytest.fixture(params=["thread", "process"])
def side(request):
    started = start_engine(config(request.param), replica_id="r", incarnation="1")
    yield started
    started.stop(10.0)
    assert not started.alive()


def test_it_starts_answers_and_stops(side):
    [first, *_] = receive_until(side, lambda event: isinstance(event, Started))
    assert isinstance(first, Started)
    assert first.agent.pages == 4 * 2**20 // first.agent.layout.page_bytes
    assert first.agent.agent_name.startswith("r-1")
    side.send(generate())
    events = receive_until(side, lambda event: isinstance(event, StateChanged) and event.state.steps == 20)
    assert events[-1].state.running == 0
    told = [event for event in events if isinstance(event, Held | Tokens | Ended)]
    assert isinstance(told[0], Held)
    assert [event.position for event in told[1:-1]] == list(range(70, 90))
    assert side.stop(10.0)


def test_an_idle_engine_takes_no_processor_time():
    side = start_engine(config("thread"), replica_id="r", incarnation="1")
    receive_until(side, lambda event: isinstance(event, Started))
    side.receive(0.5)
    before = time.process_time()
    assert side.receive(1.0) == []
    assert time.process_time() - before < 0.3
    assert side.stop(10.0)


def test_running_jobs_fail_when_it_stops(side):
    receive_until(side, lambda event: isinstance(event, Started))
    side.send(generate(max_tokens=50_000))
    receive_until(side, lambda event: isinstance(event, Tokens))
    side.stop(10.0)
    events = receive_until(side, lambda event: isinstance(event, Failed))
    assert isinstance(events[-1].error, Unavailable)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_engine_that_cannot_start_says_why(kind):
    side = start_engine(config(kind, mock_profile="nonsense"), replica_id="r", incarnation="1")
    [died] = receive_until(side, lambda event: isinstance(event, EngineDied))
    assert "mock_profile" in str(died.error)
    side.stop(5.0)
    assert not side.alive()


def test_a_bug_in_the_engine_is_told_without_its_text(monkeypatch, caplog):
    monkeypatch.setattr(loop, "_serve", lambda *_: {}["secret"])
    side = start_engine(config("thread"), replica_id="r", incarnation="1")
    died = receive_until(side, lambda event: isinstance(event, EngineDied))[-1]
    assert isinstance(died.error, InternalError)
    assert "secret" not in str(died.error)
    assert "secret" in died.detail
    assert "engine_died" in caplog.text
    assert side.stop(5.0)


def test_a_killed_engine_process_is_told_once():
    side = start_engine(config("process"), replica_id="r", incarnation="1")
    receive_until(side, lambda event: isinstance(event, Started))
    os.kill(side._process.pid, signal.SIGKILL)
    [*_, died] = receive_until(side, lambda event: isinstance(event, EngineDied))
    assert "-9" in str(died.error)
    assert side.receive(0.1) == []
    assert not side.alive()
    side.send(generate())  # nobody takes it; nothing breaks
    side.stop(1.0)


def test_new_work_is_refused_before_orders_are(monkeypatch):
    monkeypatch.setattr("kvrelay.engine.side.run_engine", lambda *_, **__: None)  # an engine that takes nothing
    side = ThreadSide(config("thread", queue_jobs=3), replica_id="r", incarnation="1")
    for i in range(3):
        side.send(generate(f"job{i}"))
    with pytest.raises(ResourceExhausted):
        side.send(generate("one more"))
    for _ in range(COMMANDS_MAX - 3):
        side.send(Cancel(job_id="job0"))
    with pytest.raises(ResourceExhausted):
        side.send(Cancel(job_id="job0"))
