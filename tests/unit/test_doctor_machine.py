"""What `kvrelay doctor` makes of a machine, its containers and its network."""

import asyncio

import pytest

from kvrelay.doctor import machine, network
from kvrelay.doctor.finding import Status
from kvrelay.doctor.machine import Isolation
from kvrelay.doctor.network import Nic

MIB = 1 << 20
EVERY = "0.0.0.0"  # noqa: S104 - compared with, not bound to
FREE = Isolation(ptrace_scope=None, may_ptrace=False, own_pid_namespace=False, container="")
FAST = Nic("eth0", up=True, mbit=100_000)
SLOW = Nic("eth1", up=True, mbit=100)
SILENT = Nic("eth2", up=True, mbit=None)


def isolation(**changes):
    return Isolation(**{name: changes.get(name, getattr(FREE, name)) for name in Isolation.__slots__})


def test_shared_memory_needs_room():
    assert machine.check_shared_memory((900 * MIB, 1024 * MIB)).status is Status.OK
    finding = machine.check_shared_memory((3 * MIB, 64 * MIB))
    assert finding.status is Status.WARN
    assert "--shm-size" in finding.advice
    assert machine.check_shared_memory(None).status is Status.SKIPPED


def test_shared_memory_is_looked_up(tmp_path):
    free, total = machine.shared_memory_free(tmp_path)
    assert 0 <= free <= total
    assert machine.shared_memory_free(tmp_path / "none") is None


def test_open_files():
    assert machine.check_open_files(1024).status is Status.WARN
    assert machine.check_open_files(65_536).status is Status.OK
    assert machine.check_open_files(None).found == "unlimited"


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, Status.OK, "absent"),
        ({"ptrace_scope": 0}, Status.OK, "ptrace_scope 0"),
        ({"ptrace_scope": 1}, Status.OK, "ptrace_scope 1"),
        ({"ptrace_scope": 2}, Status.WARN, "SYS_PTRACE"),
        ({"ptrace_scope": 2, "may_ptrace": True}, Status.OK, "ptrace_scope 2"),
        ({"ptrace_scope": 3, "may_ptrace": True}, Status.WARN, "ptrace_scope=1"),
        ({"own_pid_namespace": True, "container": "a container"}, Status.WARN, "pid: host"),
        ({"container": "a container"}, Status.OK, "in a container"),
    ],
)
def test_copies_between_processes(changes, status, words):
    finding = machine.check_cma(isolation(**changes))
    assert finding.status is status
    assert words in finding.found + finding.advice


def test_containers_show_by_their_files_and_environment(tmp_path):
    sign = tmp_path / ".dockerenv"
    assert machine.container_kind({}, [sign]) == ""
    sign.touch()
    assert machine.container_kind({}, [sign]) == "a container"
    assert machine.container_kind({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, []) == "a pod"


def test_isolation_is_read_from_this_machine():
    assert machine.read_isolation({}).ptrace_scope in {None, 0, 1, 2, 3}


def test_capabilities_are_read_from_the_kernel_s_mask(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCapEff:\t0000000000080000\n")
    assert machine.has_capability(machine.CAP_SYS_PTRACE, status)
    assert not machine.has_capability(14, status)
    assert not machine.has_capability(14, tmp_path / "none")


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5)])
def test_the_quota_of_a_container_new_form(tmp_path, text, cores):
    new = tmp_path / "cpu.max"
    new.write_text(text)
    assert machine.quota_cores((new, tmp_path / "none"), tmp_path / "none") == cores


@pytest.mark.parametrize(("text", "cores"), [("-1", None), ("200000", 2.0)])
def test_the_quota_of_a_container_old_form(tmp_path, text, cores):
    old, period = tmp_path / "quota", tmp_path / "period"
    old.write_text(text)
    period.write_text("100000")
    assert machine.quota_cores((tmp_path / "none", old), period) == cores
    assert machine.quota_cores((tmp_path / "none", tmp_path / "none"), period) is None


@pytest.mark.parametrize(
    ("here", "quota", "threads", "status", "words"),
    [
        (8, None, {"a replica": None}, Status.OK, "8 cores"),
        (8, None, {"prefill-0": 4, "decode-0": 4}, Status.OK, "prefill-0 4, decode-0 4"),
        (8, None, {"prefill-0": 8, "decode-0": 8}, Status.WARN, "--threads"),
        (2, None, {"prefill-0": 1, "prefill-1": 1, "decode-0": 1}, Status.WARN, "fewer replicas"),
        (8, 2.0, {"a replica": None}, Status.WARN, "a thread a core"),
        (8, 2.0, {"a replica": 2}, Status.OK, "2 cores' worth"),
        (8, 0.5, {"a replica": 1}, Status.OK, "0.5 cores' worth"),
    ],
)
def test_threads_against_cores(here, quota, threads, status, words):
    finding = machine.check_cores(here, quota, threads)
    assert finding.status is status
    assert words in finding.found + finding.advice


def test_threads_are_told_by_the_flag_then_the_environment():
    environment = {"KVRELAY_THREADS": "3", "OMP_NUM_THREADS": "5"}
    assert machine.threads_of(["python", "--threads=2"], environment) == 2
    assert machine.threads_of(["python"], environment) == 3
    assert machine.threads_of([], {"OMP_NUM_THREADS": "5"}) == 5
    assert machine.threads_of([], {"KVRELAY_THREADS": "0"}) is None


def test_interfaces_are_read_as_the_kernel_shows_them(tmp_path):
    for name, state, speed in (("lo", "unknown", "-1"), ("eth0", "up", "100000"), ("eth2", "up", "-1")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "operstate").write_text(state + "\n")
        (folder / "speed").write_text(speed + "\n")
    assert network.read_nics(tmp_path) == [FAST, SILENT]
    assert network.read_nics(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("nics", "environment", "rdma", "status", "words"),
    [
        ([FAST], {}, [], Status.OK, "eth0 100 Gbit/s (12 GB/s)"),
        ([SILENT], {}, [], Status.OK, "speed not told"),
        ([SLOW], {}, [], Status.WARN, "faster network"),
        ([SLOW], {}, ["mlx5_0"], Status.OK, "0.1 Gbit/s"),
        ([], {}, [], Status.SKIPPED, "loopback"),
        ([FAST], {"UCX_NET_DEVICES": "eth9"}, [], Status.FAIL, "eth9"),
        ([FAST], {"UCX_NET_DEVICES": "mlx5_0:1"}, ["mlx5_0"], Status.OK, "eth0"),
    ],
)
def test_interfaces(nics, environment, rdma, status, words):
    finding = network.check_nics(nics, environment, rdma)
    assert finding.status is status
    assert words in finding.found + finding.advice


@pytest.mark.parametrize(
    ("bind", "advertise", "own", "status"),
    [
        ("127.0.0.1", "", True, Status.OK),
        (EVERY, "", True, Status.FAIL),
        (EVERY, "localhost", True, Status.FAIL),
        (EVERY, "node-7", True, Status.OK),
        (EVERY, "node-7", False, Status.WARN),
        (EVERY, "node-7", None, Status.FAIL),
    ],
)
def test_what_would_be_advertised(bind, advertise, own, status):
    assert network.check_advertise(bind, advertise, lambda _: own).status is status


def test_this_machine_knows_its_own_addresses():
    assert network.is_own("127.0.0.1") is True
    assert network.is_own("192.0.2.1") is False
    assert network.is_own("no..host") is None


def test_loopback_beside_other_hosts_is_a_fault():
    replicas = {"prefill-0": "127.0.0.1:1", "decode-0": "node-2:1"}
    finding = network.check_addresses(replicas, {})
    assert finding.status is Status.FAIL
    assert "prefill-0" in finding.found
    assert "--advertise" in finding.advice


def test_loopback_alone_is_fine_and_what_refuses_is_named():
    replicas = {"prefill-0": "127.0.0.1:1", "decode-0": "127.0.0.1:2"}
    assert network.check_addresses(replicas, {}).status is Status.OK
    finding = network.check_addresses(replicas, {"decode-0": "Connection refused"})
    assert finding.status is Status.FAIL
    assert finding.found == "decode-0 at 127.0.0.1:2: Connection refused"


async def test_connections_are_tried_under_a_deadline():
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await network.connect(f"127.0.0.1:{port}") == ""
    assert await network.connect(f"127.0.0.1:{port}") != ""
    assert await network.connect("not an address") != ""
    assert await network.connect("127.0.0.1:1", timeout_s=0.0) == "no connection within 0 s"
