"""What the reading endpoint does when NIXL answers badly: a scripted agent stands in to give each answer on demand."""

import threading
import time

import pytest

from kvrelay.engine.protocol import AgentInfo
from kvrelay.engine.runner import KvMemory
from kvrelay.kv import nixl_endpoint
from kvrelay.kv.descriptors import coalesce
from kvrelay.kv.nixl_endpoint import ABANDONED_KEPT_S, Endpoint
from kvrelay.kv.nixl_read import NixlRead
from kvrelay.kv.transfer import ReadState, ReadStats
from kvrelay.types import KvLayout

TIMEOUT_S = 10.0
PAGE_BYTES = 1024
LAYOUT = KvLayout(
    layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16, block_tokens=16, page_bytes=PAGE_BYTES
)


class Disconnected(Exception):
    pass


class ScriptedAgent:
    """Every READ stays under way until `answers` has one for its peer: True, or an exception to raise."""

    def __init__(self):
        self.answers = {}
        self.peers = []
        self.calls = []
        self.bytes = PAGE_BYTES
        self.closed = False
        self.opened = threading.Event()
        self.opened.set()
        self._of = {}

    def connect(self, metadata):
        self.calls.append(("connect", metadata.decode()))
        return metadata.decode()

    def disconnect(self, name):
        self.calls.append(("disconnect", name))

    def prepare(self, peer, _local, _remote, _memory):
        self._of[len(self._of)] = peer
        return len(self._of) - 1

    def post(self, handle):
        return self.done(handle)

    def done(self, handle):
        answer = self.answers.get(self._of[handle], False)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stats(self, _handle):
        return ReadStats(self.bytes, 1, 0.001, "scripted")

    def release(self, handle):
        self.calls.append(("release", handle))

    def close(self):
        self.closed = True

    def failure(self, error):
        return "disconnected" if isinstance(error, Disconnected) else "transport"


class Scene:
    """An endpoint over a scripted agent, with a clock of its own."""

    def __init__(self, monkeypatch, *, opened=True):
        self.agent = ScriptedAgent()
        self.now_s = 0.0
        if not opened:
            self.agent.opened.clear()
        monkeypatch.setattr(nixl_endpoint, "Agent", self.open)
        self.endpoint = Endpoint("reader", KvMemory(0, 8, PAGE_BYTES), lambda: self.now_s)

    def open(self, _name, _memory):
        assert self.agent.opened.wait(TIMEOUT_S)
        return self.agent

    def read(self, peer="a"):
        info = AgentInfo(
            replica_id=peer,
            incarnation="1",
            agent_name=peer,
            agent_metadata=peer.encode(),
            base_address=0,
            pages=8,
            layout=LAYOUT,
        )
        read = NixlRead(info, coalesce([0], [0]), "reader")
        self.endpoint.post(read)
        return read

    def posted(self, peer="a"):
        read = self.read(peer)
        wait_until(lambda: read in self.endpoint._under_way)
        return read


def wait_until(condition):
    ends_at_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < ends_at_s
        time.sleep(0.001)


def ended(read):
    wait_until(lambda: read.state() is not ReadState.PENDING)
    return read.state(), read.reason()


@pytest.fixture
def scene(monkeypatch):
    scene = Scene(monkeypatch)
    yield scene
    scene.agent.opened.set()
    scene.endpoint.stop()
    assert scene.endpoint.join(TIMEOUT_S)


def test_a_lost_connection_fails_the_read_and_the_next_one_connects_anew(scene):
    scene.agent.answers["a"] = Disconnected()
    assert ended(scene.read()) == (ReadState.FAILED, "disconnected")
    scene.agent.answers["a"] = True
    assert ended(scene.read())[0] is ReadState.DONE
    assert [call for call in scene.agent.calls if call[0] != "release"] == [
        ("connect", "a"),
        ("disconnect", "a"),
        ("connect", "a"),
    ]
    assert scene.endpoint.usable


def test_an_error_that_leaves_a_read_in_doubt_keeps_it_pending_until_the_agent_is_closed(scene):
    beside = scene.posted("b")
    scene.agent.answers["a"] = RuntimeError("backend")
    doubtful = scene.read("a")
    wait_until(lambda: not scene.endpoint.usable)
    assert doubtful.state() is ReadState.PENDING
    assert not scene.agent.closed, "the other read goes on"
    scene.agent.answers["b"] = True
    assert ended(beside)[0] is ReadState.DONE
    assert ended(doubtful) == (ReadState.FAILED, "transport")
    assert scene.agent.closed


def test_a_read_that_moved_too_little_fails(scene):
    scene.agent.bytes = PAGE_BYTES - 1
    scene.agent.answers["a"] = True
    assert ended(scene.read()) == (ReadState.FAILED, "short")


def test_metadata_of_another_agent_fails_the_read(scene, monkeypatch):
    monkeypatch.setattr(scene.agent, "connect", lambda _metadata: "somebody else")
    assert ended(scene.read()) == (ReadState.FAILED, "unreachable")
    assert ("disconnect", "somebody else") in scene.agent.calls


def test_a_retired_endpoint_closes_on_abandoned_reads_after_a_bound_and_not_before(scene):
    read = scene.posted()
    read.abandoned_at_s = scene.now_s
    scene.endpoint.retire()
    scene.now_s += ABANDONED_KEPT_S - 1
    assert not scene.endpoint.join(0.2)
    assert read.state() is ReadState.PENDING
    scene.now_s += 1
    assert ended(read) == (ReadState.FAILED, "abandoned")
    assert scene.agent.closed


def test_a_retired_endpoint_waits_for_reads_that_nobody_gave_up(scene):
    read = scene.posted()
    scene.endpoint.hasten()
    assert not scene.endpoint.join(0.2)
    scene.agent.answers["a"] = True
    assert ended(read)[0] is ReadState.DONE
    assert scene.endpoint.join(TIMEOUT_S)


def test_a_read_abandoned_before_it_was_posted_is_never_posted(monkeypatch):
    scene = Scene(monkeypatch, opened=False)
    read = scene.read()
    read.abandoned_at_s = 0.0
    scene.agent.opened.set()
    assert ended(read) == (ReadState.FAILED, "abandoned")
    assert scene.agent.calls == []
    scene.endpoint.stop()
    assert scene.endpoint.join(TIMEOUT_S)


def test_past_the_bound_of_the_inbox_a_read_fails_at_once(monkeypatch):
    monkeypatch.setattr(nixl_endpoint, "INBOX_MAX", 2)
    scene = Scene(monkeypatch, opened=False)
    reads = [scene.read() for _ in range(3)]
    assert (reads[2].state(), reads[2].reason()) == (ReadState.FAILED, "busy")
    scene.agent.answers["a"] = True
    scene.agent.opened.set()
    assert {ended(read)[0] for read in reads[:2]} == {ReadState.DONE}
    scene.endpoint.stop()
    assert scene.endpoint.join(TIMEOUT_S)


def test_an_agent_that_does_not_open_fails_its_reads(monkeypatch):
    def refuse(_name, _memory):
        raise RuntimeError("no memory")

    monkeypatch.setattr(nixl_endpoint, "Agent", refuse)
    endpoint = Endpoint("reader", KvMemory(0, 8, PAGE_BYTES))
    assert endpoint.join(TIMEOUT_S)
    assert not endpoint.usable


def test_after_closing_a_read_fails_at_once(scene):
    scene.endpoint.stop()
    assert scene.endpoint.join(TIMEOUT_S)
    read = scene.read()
    assert (read.state(), read.reason()) == (ReadState.FAILED, "closed")


def test_the_peer_unused_for_longest_makes_room_for_a_new_one(scene, monkeypatch):
    monkeypatch.setattr(nixl_endpoint, "PEERS_MAX", 2)
    busy = scene.posted("busy")
    scene.agent.answers = {"old": True, "new": True}
    assert ended(scene.read("old"))[0] is ReadState.DONE
    assert ended(scene.read("new"))[0] is ReadState.DONE
    assert [call for call in scene.agent.calls if call[0] == "disconnect"] == [("disconnect", "old")]
    assert busy.state() is ReadState.PENDING


def test_an_idle_peer_is_forgotten_by_disconnecting(scene):
    scene.agent.answers["a"] = True
    assert ended(scene.read())[0] is ReadState.DONE
    scene.endpoint.forget("a")
    wait_until(lambda: ("disconnect", "a") in scene.agent.calls)
    assert scene.endpoint.usable


def test_a_peer_forgotten_while_it_is_read_closes_the_endpoint_on_it(scene):
    read = scene.posted()
    scene.endpoint.forget("a")
    assert ended(read) == (ReadState.FAILED, "forgotten")
    assert scene.agent.closed
