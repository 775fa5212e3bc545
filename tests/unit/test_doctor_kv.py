"""What `kvrelay doctor` makes of NIXL, UCX and RDMA."""

import pytest

from kvrelay.doctor import nixl, rdma, ucx
from kvrelay.doctor.finding import Status
from kvrelay.doctor.probe import Probed
from kvrelay.doctor.rdma import RdmaPort

WELL = {"module": "nixl_cu12", "version": "1.5.1", "plugins": ["POSIX", "UCX"]}
ACTIVE = RdmaPort("mlx5_0", "1", "ACTIVE", "100 Gb/sec (4X EDR)")
DOWN = RdmaPort("mlx5_1", "1", "DOWN", "10 Gb/sec (4X SDR)")
MIB = 1 << 20

TOLD = """\
[1.0] [vm:1 :1]   | active message by ucp_am_send* from host memory                  |
[1.0] [vm:1 :1]   |     0..8176 | short              | tcp/lo                          |
[1.0] [vm:1 :1]   +--------+-------------+-------------------------------------------+
[1.0] [vm:1 :1]   | reader intra-node cfg#1                                          |
[1.0] [vm:1 :1]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1 :1]   +--------+-------------+-------------------------------------------+
[1.0] [vm:1 :1]   | Range  | Description |                  Config                   |
[1.0] [vm:1 :1]   +--------+-------------+-------------------------------------------+
[1.0] [vm:1 :1]   | 0..512 | copy        | tcp/lo                                    |
[1.0] [vm:1 :1]   | 513..inf | zero-copy   | cma/memory                              |
[1.0] [vm:1 :1]   +--------+-------------+-------------------------------------------+
"""


def loaded(nixl_values=WELL, libraries=("/a/libucp.so.0",)):
    return Probed({"torch": {}, "flash_attn": {}, "nixl": nixl_values, "ucx_libraries": list(libraries)})


def measured(read_s=0.01, copy_s=0.01, log=TOLD):
    return Probed({"bytes": 64 * MIB, "read_s": read_s, "copy_s": copy_s, "memory": "DRAM"}, log=log)


def test_nixl_that_works():
    finding = nixl.check_nixl(loaded())
    assert finding.status is Status.OK
    assert finding.found == "nixl_cu12 1.5.1; plugins POSIX, UCX; UCX opens an agent"


@pytest.mark.parametrize(
    ("values", "status", "words"),
    [
        ({}, Status.WARN, "kvrelay[worker]"),
        (WELL | {"plugins": ["POSIX"]}, Status.FAIL, "no UCX plugin"),
        (WELL | {"error": "nixlBackendError: x"}, Status.FAIL, "nixlBackendError"),
    ],
)
def test_nixl_that_does_not(values, status, words):
    finding = nixl.check_nixl(loaded(values))
    assert finding.status is status
    assert words in finding.found + finding.advice


def test_nixl_that_crashes_the_process_is_a_finding():
    assert nixl.check_nixl(Probed(error="the process was killed by SIGABRT")).status is Status.FAIL


def test_what_ucx_complains_of_is_told_instead_of_nixl_s_code():
    log = "[1.0] [vm:1 :0]  ucp_context.c:1508 UCX  WARN  network device 'eth9' is not available\nmore"
    probed = Probed({"nixl": WELL | {"error": "NIXL_ERR_BACKEND"}}, log=log)
    assert "network device 'eth9' is not available" in nixl.check_nixl(probed).found


def test_two_ucx_libraries_in_one_process_are_a_fault():
    finding = nixl.check_ucx_libraries(loaded(libraries=["/a/libucp.so.0", "/usr/lib/libucp.so.0"]), {})
    assert finding.status is Status.FAIL
    assert "/a and /usr/lib" in finding.found


def test_a_running_replica_with_two_is_named():
    replicas = {"prefill-0": ["/a/libucp.so.0"], "decode-0": ["/a/libucp.so.0", "/b/libucp.so.0"]}
    finding = nixl.check_ucx_libraries(loaded(), replicas)
    assert finding.status is Status.FAIL
    assert finding.found.startswith("decode-0 loads 2")


def test_one_a_process_is_fine_wherever_it_lies():
    assert nixl.check_ucx_libraries(loaded(), {"prefill-0": ["/b/libucp.so.0"]}).status is Status.OK
    assert nixl.check_ucx_libraries(loaded(libraries=[]), {}).status is Status.SKIPPED


def test_ucx_libraries_are_found_in_the_maps_of_a_process():
    maps = (
        "7f00-7f01 r-xp 0000 08:01 1 /x/nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0\n"
        "7f01-7f02 rw-p 0000 08:01 1 /x/nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0\n"
        "7f02-7f03 r-xp 0000 08:01 2 /x/nixl_cu12.libs/libuct-1141f529.so.0.0.0\n"
        "7f03-7f04 r-xp 0000 08:01 3 /usr/lib/libucp.so.0\n"
    )
    assert ucx.libraries_in(maps) == ["/usr/lib/libucp.so.0", "/x/nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0"]


def test_the_transport_is_the_one_that_large_reads_go_over():
    assert ucx.read_transport(TOLD) == "cma/memory"
    assert ucx.read_transport("") == ""


def test_bandwidth_over_shared_memory_is_fine():
    finding = nixl.check_bandwidth(measured(), {})
    assert finding.status is Status.OK
    assert "READ 6.7 GB/s over cma/memory, memcpy 6.7 GB/s (100%)" in finding.found
    assert "UCX_TLS=all" in finding.found


def test_tcp_within_a_machine_is_told_with_its_cause():
    log = TOLD.replace("cma/memory", "tcp/lo")
    assert "see cma" in nixl.check_bandwidth(measured(log=log), {}).advice
    assert "unset UCX_TLS" in nixl.check_bandwidth(measured(log=log), {"UCX_TLS": "tcp"}).advice


def test_slow_reads_are_told():
    assert nixl.check_bandwidth(measured(read_s=0.1), {}).status is Status.WARN


@pytest.mark.parametrize("probed", [Probed(error="no answer within 60 s"), Probed({"error": "a READ failed: x"})])
def test_reads_that_fail_are_told(probed):
    finding = nixl.check_bandwidth(probed, {})
    assert finding.status is Status.FAIL
    assert "UCX_LOG_LEVEL" in finding.advice


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        ({}, ""),
        ({"UCX_MODULES": "^ib"}, "UCX_MODULES=^ib"),
        ({"UCX_MODULES": "cma,ib"}, ""),
        ({"UCX_MODULES": "cma"}, "UCX_MODULES=cma"),
        ({"UCX_MODULES": "^cma"}, ""),
        ({"UCX_TLS": "tcp,cma"}, "UCX_TLS=tcp,cma"),
        ({"UCX_TLS": "rc,tcp"}, ""),
        ({"UCX_TLS": "^tcp"}, ""),
        ({"UCX_TLS": "^ib"}, "UCX_TLS=^ib"),
    ],
)
def test_settings_that_hide_rdma(environment, setting):
    assert ucx.hides_rdma(environment) == setting


def test_devices_that_ucx_is_told_of_and_that_are_not_here():
    known = frozenset({"eth0", "mlx5_0"})
    assert ucx.unknown_devices({}, known) == []
    assert ucx.unknown_devices({"UCX_NET_DEVICES": "eth0,mlx5_0:1"}, known) == []
    assert ucx.unknown_devices({"UCX_NET_DEVICES": "eth0,mlx5_9:1"}, known) == ["mlx5_9:1"]
    assert ucx.unknown_devices({"UCX_NET_DEVICES": "^eth9"}, known) == []


def test_rdma_ports_are_read_as_the_kernel_shows_them(tmp_path):
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert rdma.read_ports(tmp_path) == [ACTIVE]
    assert rdma.read_ports(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("ports", "environment", "verbs", "status", "words"),
    [
        ([], {}, False, Status.SKIPPED, "TCP"),
        ([ACTIVE], {}, True, Status.OK, "100 Gb/sec"),
        ([DOWN], {}, True, Status.WARN, "no port is active"),
        ([ACTIVE, DOWN], {}, True, Status.OK, "DOWN"),
        ([ACTIVE], {"UCX_MODULES": "^ib"}, True, Status.WARN, "unset UCX_MODULES"),
        ([ACTIVE], {}, False, Status.WARN, "--device /dev/infiniband"),
    ],
)
def test_rdma(ports, environment, verbs, status, words):
    finding = rdma.check_rdma(ports, environment, verbs=verbs)
    assert finding.status is status
    assert words in finding.found + finding.advice


@pytest.mark.parametrize(
    ("ports", "limit", "may_lock", "status"),
    [
        ([], 8 * MIB, False, Status.SKIPPED),
        ([ACTIVE], 8 * MIB, False, Status.FAIL),
        ([ACTIVE], 8 * MIB, True, Status.OK),
        ([ACTIVE], 2048 * MIB, False, Status.OK),
        ([ACTIVE], None, False, Status.OK),
    ],
)
def test_locked_memory_matters_with_rdma(ports, limit, may_lock, status):
    finding = rdma.check_locked_memory(ports, limit, may_lock=may_lock, pool_mib=1024)
    assert finding.status is status


@pytest.mark.parametrize(
    ("ports", "gpu", "module", "status"),
    [
        ([ACTIVE], False, False, Status.SKIPPED),
        ([DOWN], True, False, Status.SKIPPED),
        ([ACTIVE], True, True, Status.OK),
        ([ACTIVE], True, False, Status.WARN),
    ],
)
def test_peer_memory_matters_with_rdma_and_a_gpu(ports, gpu, module, status):
    assert rdma.check_peer_memory(ports, gpu=gpu, module=module).status is status
