"""KV pages over real NIXL between agents of one process, and of two processes of which one dies or stalls."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from nixl_peer import Child, Pool, page_of

from kvrelay.errors import InvalidArgument
from kvrelay.kv.nixl_agent import prepare_environment, transport_name
from kvrelay.kv.transfer import Read, ReadState

TIMEOUT_S = 30.0
PAGES = 32
PAGE_BYTES = 64 * 1024
SEED = 7

# Large enough that a READ over TCP is not over before the peer stops reading its socket.
BIG_PAGE_BYTES = 1024 * 1024


def wait_until(condition: Callable[[], bool], what: str) -> None:
    started_at_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at_s < TIMEOUT_S, f"{what}: not within {TIMEOUT_S} s"
        time.sleep(0.001)
    print(f"{what}: {1e3 * (time.monotonic() - started_at_s):.1f} ms")


def wait_final(read: Read, what: str = "read") -> ReadState:
    wait_until(lambda: read.state() is not ReadState.PENDING, what)
    return read.state()


def threads_and_files() -> tuple[int, ...]:
    return tuple(len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd"))


def matches(pool: Pool, local: list[int], remote: list[int], seed: int = SEED) -> bool:
    size = pool.memory.shape[1]
    return all(
        np.array_equal(pool.memory[here], page_of(seed, there, size)) for here, there in zip(local, remote, strict=True)
    )


@pytest.fixture
def make_pool():
    pools = []

    def make(name: str, *, pages: int = PAGES, page_bytes: int = PAGE_BYTES, seed: int | None = None) -> Pool:
        pools.append(Pool(f"{name}-{os.urandom(4).hex()}", pages=pages, page_bytes=page_bytes, seed=seed))
        return pools[-1]

    yield make
    for pool in pools:
        pool.transfer.close()


@pytest.fixture
def make_child():
    children = []

    def make(*, page_bytes: int = PAGE_BYTES, seed: int = SEED, environment: dict[str, str] | None = None) -> Child:
        children.append(Child.start(pages=PAGES, page_bytes=page_bytes, seed=seed, environment=environment))
        return children[-1]

    yield make
    for child in children:
        child.end()


@pytest.fixture
def over_tcp(monkeypatch):
    """Without shared memory a stopped peer leaves a READ under way, as a peer on another machine does."""
    monkeypatch.setenv("UCX_TLS", "tcp")


# ---------------------------------------------------------------- what is moved


def test_pages_arrive_in_the_local_pages_named_and_nowhere_else(make_pool):
    owner, puller = make_pool("owner", seed=SEED), make_pool("puller")
    remote, local = [3, 9, 4, 20], [0, 7, 5, 30]
    read = puller.transfer.read(owner.info(), remote_pages=remote, local_pages=local)
    assert wait_final(read) is ReadState.DONE
    assert matches(puller, local, remote)
    others = [page for page in range(PAGES) if page not in local]
    assert not puller.memory[others].any()
    read.close()


def test_runs_consecutive_on_both_sides_become_one_descriptor(make_pool):
    owner, puller = make_pool("owner", seed=SEED), make_pool("puller")
    remote = [0, 1, 2, 10, 11, 20, 21]
    local = [4, 5, 6, 7, 8, 10, 12]  # 10, 11 follow 7, 8; 20, 21 do not stay together
    read = puller.transfer.read(owner.info(), remote_pages=remote, local_pages=local)
    assert wait_final(read) is ReadState.DONE
    stats = read.stats()
    assert (stats.descriptors, stats.bytes) == (4, 7 * PAGE_BYTES)
    assert stats.elapsed_s > 0
    assert stats.transport.startswith("ucx")
    assert matches(puller, local, remote)


def test_a_whole_pool_is_one_descriptor(make_pool):
    owner, puller = make_pool("owner", seed=SEED), make_pool("puller")
    pages = list(range(PAGES))
    read = puller.transfer.read(owner.info(), remote_pages=pages, local_pages=pages)
    assert wait_final(read) is ReadState.DONE
    assert (read.stats().descriptors, read.stats().bytes) == (1, PAGES * PAGE_BYTES)
    assert np.array_equal(owner.memory, puller.memory)


def test_two_replicas_read_from_each_other_at_once(make_pool):
    one, two = make_pool("one", seed=1), make_pool("two", seed=2)
    to_one = [one.transfer.read(two.info(), remote_pages=[page], local_pages=[16 + page]) for page in range(16)]
    to_two = [two.transfer.read(one.info(), remote_pages=[page], local_pages=[16 + page]) for page in range(16)]
    assert {wait_final(read) for read in to_one + to_two} == {ReadState.DONE}
    assert matches(one, list(range(16, 32)), list(range(16)), seed=2)
    assert matches(two, list(range(16, 32)), list(range(16)), seed=1)


@pytest.mark.parametrize(
    ("remote", "local", "field"),
    [
        ([], [], "remote_pages"),
        ([1, 2], [1], "remote_pages"),
        ([1, 2], [1, 1], "local_pages"),
        ([PAGES], [1], "remote_pages"),
        ([1], [PAGES], "local_pages"),
        ([-1], [1], "remote_pages"),
    ],
)
def test_wrong_page_lists_are_refused_by_name(make_pool, remote, local, field):
    pool = make_pool("pool")
    with pytest.raises(InvalidArgument) as raised:
        pool.transfer.read(pool.info(), remote_pages=remote, local_pages=local)
    assert raised.value.field == field


def test_pools_with_other_page_sizes_are_refused(make_pool):
    owner, puller = make_pool("owner", page_bytes=2 * PAGE_BYTES), make_pool("puller")
    with pytest.raises(InvalidArgument, match="page_bytes"):
        puller.transfer.read(owner.info(), remote_pages=[0], local_pages=[0])


def test_closing_gives_threads_and_files_back(make_pool):
    make_pool("first").transfer.close()  # what NIXL starts once a process stays
    before = threads_and_files()
    for _ in range(3):
        owner, puller = make_pool("owner", seed=SEED), make_pool("puller")
        assert wait_final(puller.transfer.read(owner.info(), remote_pages=[1], local_pages=[2])) is ReadState.DONE
        owner.transfer.close()
        puller.transfer.close()

    def given_back() -> bool:
        return all(now <= then for now, then in zip(threads_and_files(), before, strict=True))

    wait_until(given_back, "threads and files are given back")


def test_an_idle_replica_keeps_no_core_busy(make_pool):
    owner, puller = make_pool("owner", seed=SEED), make_pool("puller")
    assert wait_final(puller.transfer.read(owner.info(), remote_pages=[1], local_pages=[2])) is ReadState.DONE
    used_s, started_at_s = time.process_time(), time.monotonic()
    wait_until(lambda: time.monotonic() - started_at_s > 1.0, "a second passes")
    share = time.process_time() - used_s
    print(f"idle: {100 * share:.1f} % of a core")
    assert share < 0.5


# ---------------------------------------------------------------- two processes


def test_pages_of_another_process_arrive(make_pool, make_child):
    child, puller = make_child(), make_pool("puller")
    remote, local = [0, 1, 2, 3, 9], [8, 9, 10, 11, 0]
    read = puller.transfer.read(child.info, remote_pages=remote, local_pages=local)
    assert wait_final(read) is ReadState.DONE
    assert (read.stats().descriptors, read.stats().bytes) == (2, 5 * PAGE_BYTES)
    assert matches(puller, local, remote)


def test_a_peer_killed_between_reads_fails_the_next_and_its_successor_works(make_pool, make_child):
    child, puller = make_child(), make_pool("puller")
    assert wait_final(puller.transfer.read(child.info, remote_pages=[0], local_pages=[0])) is ReadState.DONE
    child.kill()
    read = puller.transfer.read(child.info, remote_pages=[1], local_pages=[1])
    assert wait_final(read, "read from a dead peer") is ReadState.FAILED
    assert read.reason() in {"disconnected", "unreachable", "transport"}
    puller.transfer.forget(child.info.agent_name)
    successor = make_child(seed=SEED + 1)
    read = puller.transfer.read(successor.info, remote_pages=[1], local_pages=[1])
    assert wait_final(read, "read from its successor") is ReadState.DONE
    assert matches(puller, [1], [1], seed=SEED + 1)


def test_a_peer_that_died_before_the_first_read_fails_it(make_pool, make_child):
    child, puller = make_child(), make_pool("puller")
    child.kill()
    read = puller.transfer.read(child.info, remote_pages=[1], local_pages=[1])
    assert wait_final(read, "read from a peer never met") is ReadState.FAILED
    assert read.reason() in {"disconnected", "unreachable", "transport"}


def under_way(puller: Pool, child: Child) -> Read:
    """Stop the peer and post a READ that cannot end."""
    assert wait_final(puller.transfer.read(child.info, remote_pages=[0], local_pages=[0])) is ReadState.DONE
    child.stop()
    read = puller.transfer.read(child.info, remote_pages=list(range(16)), local_pages=list(range(16)))
    wait_until(lambda: posted(puller, read), "the READ is posted")
    assert read.state() is ReadState.PENDING
    return read


def posted(puller: Pool, read: Read) -> bool:
    return any(read in endpoint._under_way for endpoint in puller.transfer._endpoints())


@pytest.mark.usefixtures("over_tcp")
def test_a_peer_killed_during_a_read_fails_it_and_its_successor_works(make_pool, make_child):
    child, puller = make_child(page_bytes=BIG_PAGE_BYTES), make_pool("puller", page_bytes=BIG_PAGE_BYTES)
    read = under_way(puller, child)
    child.kill()
    assert wait_final(read, "read from a peer killed during it") is ReadState.FAILED
    assert read.reason() == "disconnected"
    read.close()
    successor = make_child(page_bytes=BIG_PAGE_BYTES, seed=SEED + 1)
    read = puller.transfer.read(successor.info, remote_pages=[1, 2], local_pages=[1, 2])
    assert wait_final(read, "read from its successor") is ReadState.DONE
    assert matches(puller, [1, 2], [1, 2], seed=SEED + 1)
    assert read.stats().transport == "ucx:tcp"


@pytest.mark.usefixtures("over_tcp")
def test_an_abandoned_read_holds_its_pages_until_it_has_landed_and_new_ones_go_around_it(make_pool, make_child):
    child, puller = make_child(page_bytes=BIG_PAGE_BYTES), make_pool("puller", page_bytes=BIG_PAGE_BYTES)
    read = under_way(puller, child)
    puller.transfer.abandon(read)
    puller.memory[:16] = 0
    fresh = puller.transfer.read(child.info, remote_pages=[20], local_pages=[20])
    assert puller.transfer._reader.name != read.endpoint_name
    wait_until(lambda: posted(puller, fresh), "the fresh READ is posted")
    assert read.state() is ReadState.PENDING, "nothing proves yet that the stopped peer will not answer"
    child.resume()
    assert wait_final(fresh, "read through the fresh agent") is ReadState.DONE
    assert matches(puller, [20], [20])
    assert wait_final(read, "abandoned read") is ReadState.DONE
    assert matches(puller, list(range(16)), list(range(16))), "it landed after it was abandoned"
    [old] = puller.transfer._retired
    assert old.join(TIMEOUT_S)
    puller.memory[:16] = 0
    again = puller.transfer.read(child.info, remote_pages=[21], local_pages=[21])
    assert wait_final(again) is ReadState.DONE
    assert not puller.memory[:16].any(), "pages of a final read are safe to use again"


@pytest.mark.usefixtures("over_tcp")
def test_reads_from_other_peers_go_on_when_one_is_abandoned(make_pool, make_child):
    child, puller = make_child(page_bytes=BIG_PAGE_BYTES), make_pool("puller", page_bytes=BIG_PAGE_BYTES)
    other = make_child(page_bytes=BIG_PAGE_BYTES, seed=SEED + 1)
    stuck = under_way(puller, child)
    beside = puller.transfer.read(other.info, remote_pages=[17], local_pages=[17])
    puller.transfer.abandon(stuck)
    assert wait_final(beside, "read beside the stuck one") is ReadState.DONE
    assert matches(puller, [17], [17], seed=SEED + 1)
    after = puller.transfer.read(other.info, remote_pages=[18], local_pages=[18])
    assert wait_final(after, "read after the stuck one") is ReadState.DONE
    assert stuck.state() is ReadState.PENDING


@pytest.mark.usefixtures("over_tcp")
def test_forgetting_a_stopped_peer_fails_its_reads_by_closing_the_agent(make_pool, make_child):
    child, puller = make_child(page_bytes=BIG_PAGE_BYTES), make_pool("puller", page_bytes=BIG_PAGE_BYTES)
    other = make_child(page_bytes=BIG_PAGE_BYTES, seed=SEED + 1)
    read = under_way(puller, child)
    puller.transfer.forget(child.info.agent_name)
    assert wait_final(read, "read from a forgotten peer") is ReadState.FAILED
    assert read.reason() == "forgotten"
    puller.memory[:16] = 0
    child.resume()
    after = puller.transfer.read(other.info, remote_pages=list(range(16, 32)), local_pages=list(range(16, 32)))
    assert wait_final(after, "read from another peer") is ReadState.DONE
    assert not puller.memory[:16].any()


@pytest.mark.usefixtures("over_tcp")
def test_closing_with_a_stuck_read_ends_within_a_bound(make_pool, make_child):
    child, puller = make_child(page_bytes=BIG_PAGE_BYTES), make_pool("puller", page_bytes=BIG_PAGE_BYTES)
    read = under_way(puller, child)
    puller.transfer.close()
    assert read.state() is ReadState.FAILED
    assert read.reason() == "closed"


# ---------------------------------------------------------------- environment


def test_the_rdma_module_is_left_out_only_where_there_is_no_device(tmp_path):
    without: dict[str, str] = {}
    prepare_environment(without, rdma_devices=tmp_path)
    assert without["UCX_MODULES"] == "^ib"
    (tmp_path / "mlx5_0").mkdir()
    with_device: dict[str, str] = {}
    prepare_environment(with_device, rdma_devices=tmp_path)
    assert "UCX_MODULES" not in with_device


def test_what_the_operator_set_stays():
    environment = {"UCX_MODULES": "all", "UCX_LOG_FILE": "stdout"}
    prepare_environment(environment)
    assert environment == {"UCX_MODULES": "all", "UCX_LOG_FILE": "stdout"}


def test_the_transport_is_told_as_far_as_it_is_known():
    assert transport_name({}) == "ucx"
    assert transport_name({"UCX_TLS": "tcp"}) == "ucx:tcp"
