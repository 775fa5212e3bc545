"""The fault-injecting transfer does to each read what its plan says, and to no other."""

import ctypes
import dataclasses

import pytest

from kvrelay.engine.protocol import AgentInfo
from kvrelay.kv.faults import INJECTED, KILLED, Fault, FaultyTransfer, listed, seeded
from kvrelay.kv.memory import MemoryNetwork, MemoryTransfer
from kvrelay.kv.transfer import ReadState, ReadStats
from kvrelay.types import KvLayout

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16, block_tokens=16, page_bytes=1024)
SOURCE = AgentInfo(
    replica_id="a", incarnation="1", agent_name="a-1", agent_metadata=b"", base_address=0, pages=8, layout=LAYOUT
)
OTHER = dataclasses.replace(SOURCE, agent_name="b-1")
DONE, FAILED, PENDING = ReadState.DONE, ReadState.FAILED, ReadState.PENDING


class DoneRead:
    def __init__(self, pages):
        self.pages = pages
        self.closed = False

    def state(self):
        return DONE

    def reason(self):
        return ""

    def stats(self):
        return ReadStats(1024 * self.pages, 1, 0.001, "fake")

    def close(self):
        self.closed = True


class Immediate:
    """Every read is done as soon as it is posted."""

    def __init__(self):
        self.posted = []
        self.abandoned = []
        self.forgotten = []
        self.closed = False

    def register(self, **memory):
        self.memory = memory

    def agent(self):
        return "me-1", b"metadata"

    def read(self, source, *, remote_pages, local_pages):
        read = DoneRead(len(local_pages))
        self.posted.append((source.agent_name, remote_pages, local_pages, read))
        return read

    def abandon(self, read):
        self.abandoned.append(read)

    def forget(self, agent_name):
        self.forgotten.append(agent_name)

    def close(self):
        self.closed = True


@pytest.fixture
def inner():
    return Immediate()


def post(transfer, count=1, source=SOURCE):
    return [transfer.read(source, remote_pages=[1, 2], local_pages=[3, 4]) for _ in range(count)]


def test_without_faults_everything_passes_through(inner):
    transfer = FaultyTransfer(inner, listed({}))
    [read] = post(transfer)
    assert inner.posted[0][:3] == ("a-1", [1, 2], [3, 4])
    assert (read.state(), read.reason(), read.stats().bytes) == (DONE, "", 2048)
    read.close()
    assert inner.posted[0][3].closed
    transfer.register(base_address=1, pages=2, page_bytes=3, memory="DRAM", device_id=0)
    assert inner.memory["pages"] == 2
    assert transfer.agent() == ("me-1", b"metadata")
    transfer.close()
    assert inner.closed


def test_the_chosen_read_fails_and_moves_nothing(inner):
    reads = post(FaultyTransfer(inner, listed({1: Fault(fails=True)})), 3)
    assert [read.state() for read in reads] == [DONE, FAILED, DONE]
    assert reads[1].reason() == INJECTED
    assert len(inner.posted) == 2
    reads[1].close()


def test_a_held_read_stays_pending_and_lands_only_when_let_go(inner):
    transfer = FaultyTransfer(inner, listed({0: Fault(hold=True)}))
    [read] = post(transfer)
    assert {read.state() for _ in range(100)} == {PENDING}
    with pytest.raises(AssertionError):
        read.close()
    transfer.abandon(read)
    assert transfer.abandoned == [read]
    assert (read.state(), inner.posted, inner.abandoned) == (PENDING, [], [])
    transfer.let_go([0])
    assert read.state() is DONE
    assert len(inner.posted) == 1


def test_a_delayed_read_takes_the_polls_planned(inner):
    [read] = post(FaultyTransfer(inner, listed({0: Fault(delay_polls=3)})))
    assert [read.state() for _ in range(5)] == [PENDING, PENDING, PENDING, DONE, DONE]


def test_abandoning_a_posted_read_reaches_the_inner_transfer(inner):
    transfer = FaultyTransfer(inner, listed({}))
    [read] = post(transfer)
    transfer.abandon(read)
    assert inner.abandoned == [inner.posted[0][3]]


def test_forgetting_a_peer_fails_its_held_reads_only(inner):
    transfer = FaultyTransfer(inner, listed(dict.fromkeys((0, 1), Fault(hold=True))))
    [of_peer], [of_other] = post(transfer), post(transfer, source=OTHER)
    transfer.forget("a-1")
    assert (of_peer.state(), of_other.state()) == (FAILED, PENDING)
    assert inner.forgotten == ["a-1"]
    transfer.close()
    assert of_other.state() is FAILED


def test_a_read_that_lands_early_moves_its_bytes_at_once_and_tells_later(inner):
    [read] = post(FaultyTransfer(inner, listed({0: Fault(early=True, delay_polls=2)})))
    assert len(inner.posted) == 1
    assert [read.state() for _ in range(3)] == [PENDING, PENDING, DONE]
    assert len(inner.posted) == 1


def test_a_share_of_a_read_lands_before_it_fails(inner):
    [read] = post(FaultyTransfer(inner, listed({0: Fault(fails=True, landed_share=0.5)})))
    assert (read.state(), read.reason()) == (FAILED, INJECTED)
    assert inner.posted[0][1:3] == ([1], [3])


def test_reads_of_a_stopped_peer_wait_for_it_and_no_others_do(inner):
    transfer = FaultyTransfer(inner, listed({}))
    transfer.stop_peer("a-1")
    [of_peer], [of_other] = post(transfer), post(transfer, source=OTHER)
    assert (of_peer.state(), of_other.state()) == (PENDING, DONE)
    assert [posted[0] for posted in inner.posted] == ["b-1"]
    transfer.resume_peer("a-1")
    assert of_peer.state() is DONE
    assert [read.state() for read in post(transfer)] == [DONE]


def test_a_killed_peer_leaves_its_reads_half_landed_and_those_before_as_they_were(inner):
    transfer = FaultyTransfer(inner, listed({1: Fault(delay_polls=9)}))
    before, during = post(transfer, 2)
    transfer.kill_peer("a-1")
    assert (before.state(), during.state(), during.reason()) == (DONE, FAILED, KILLED)
    assert inner.posted[1][1:3] == ([1], [3])


def test_a_read_lands_in_time_though_nobody_looks_at_it(inner):
    transfer = FaultyTransfer(inner, listed({0: Fault(delay_polls=2)}))
    post(transfer)
    transfer.poll_all()
    transfer.poll_all()
    assert not inner.posted
    transfer.poll_all()
    assert len(inner.posted) == 1


def test_memory_is_copied_between_pools_of_one_network_until_their_owner_leaves():
    network = MemoryNetwork()
    pools = {name: ctypes.create_string_buffer(name.encode() * 64, 64) for name in "ab"}
    ends = {name: MemoryTransfer(network, name) for name in pools}
    for name, end in ends.items():
        address = ctypes.addressof(pools[name])
        end.register(base_address=address, pages=4, page_bytes=16, memory="DRAM", device_id=0)
    source = dataclasses.replace(SOURCE, agent_name="a", base_address=ctypes.addressof(pools["a"]), pages=4)
    read = ends["b"].read(source, remote_pages=[0, 3], local_pages=[2, 1])
    assert (read.state(), read.stats().bytes) == (DONE, 32)
    assert pools["b"].raw == b"b" * 16 + b"a" * 32 + b"b" * 16
    ends["a"].close()
    assert ends["b"].read(source, remote_pages=[0], local_pages=[0]).state() is FAILED
    assert pools["b"].raw[:16] == b"b" * 16


def test_a_seed_gives_one_plan():
    def drawn(seed):
        plan = seeded(seed, share=0.5, delay_polls_max=4)
        return [plan(number) for number in range(100)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    treated = [fault for fault in drawn(1) if fault != Fault()]
    assert 30 < len(treated) < 70
    assert {fault.delay_polls for fault in treated} == set(range(5))
    assert {(fault.early, fault.fails) for fault in treated} == {(e, f) for e in (True, False) for f in (True, False)}
