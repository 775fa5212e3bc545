"""Checks of RDMA: devices, what hides them, locked memory, GPU memory."""

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvrelay.doctor import ucx
from kvrelay.doctor.finding import Finding, fail, ok, skipped, warn
from kvrelay.kv.nixl_agent import RDMA_DEVICES

MIB: Final = 1 << 20
VERBS: Final = Path("/dev/infiniband")
PEER_MEMORY_MODULES: Final = (Path("/sys/module/nvidia_peermem"), Path("/sys/module/nv_peer_mem"))
CAP_IPC_LOCK: Final = 14
"""Number of the capability that lifts the limit on locked memory (capabilities(7), linux/capability.h)."""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device, with the words of the kernel: "ACTIVE", "100 Gb/sec (4X EDR)"."""

    device: str
    port: str
    state: str
    rate: str

    @property
    def active(self) -> bool:
        """Whether it carries traffic."""
        return self.state == "ACTIVE"

    def __str__(self) -> str:
        return f"{self.device}:{self.port} {self.state}, {self.rate}"


def read_ports(root: Path = RDMA_DEVICES) -> list[RdmaPort]:
    """Return the ports of all RDMA devices that the kernel shows."""
    if not root.is_dir():
        return []
    folders = sorted(root.glob("*/ports/*"))
    return [
        RdmaPort(
            device=folder.parents[1].name,
            port=folder.name,
            state=_text(folder / "state").rpartition(": ")[2],
            rate=_text(folder / "rate") or "rate unknown",
        )
        for folder in folders
    ]


def locked_memory_limit() -> int | None:
    """Return the limit on locked memory, bytes; None: there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def check_rdma(ports: Sequence[RdmaPort], environment: Mapping[str, str], *, verbs: bool) -> Finding:
    """Check that RDMA devices are up and that UCX may use them.

    Args:
        ports: what the kernel shows.
        environment: the operator's settings of UCX.
        verbs: whether the device files of RDMA are there (a container needs them passed).
    """
    if not ports:
        return skipped("rdma", "no RDMA device: between machines KV travels over TCP")
    found = "; ".join(str(port) for port in ports)
    if not any(port.active for port in ports):
        return warn("rdma", found, "no port is active: check cables, the subnet manager (InfiniBand), ip link (RoCE)")
    hidden = ucx.hides_rdma(environment)
    if hidden:
        return warn("rdma", f"{found}; but {hidden}", f"unset {hidden.partition('=')[0]}: it hides RDMA from UCX")
    if not verbs:
        return warn("rdma", f"{found}; but no {VERBS}", "pass the devices: docker run --device /dev/infiniband")
    return ok("rdma", found)


def check_locked_memory(ports: Sequence[RdmaPort], limit: int | None, *, may_lock: bool, pool_mib: int) -> Finding:
    """Check that a KV pool may be locked, which RDMA needs.

    Args:
        ports: what RDMA there is.
        limit: bytes that this process may lock; None: no limit.
        may_lock: whether a capability lifts the limit.
        pool_mib: size of a KV pool.
    """
    told = "unlimited" if limit is None else f"{limit / MIB:.0f} MiB"
    if not any(port.active for port in ports):
        return skipped("memlock", f"{told}; it matters with RDMA only")
    if limit is None or may_lock or limit >= pool_mib * MIB:
        return ok("memlock", told)
    advice = "ulimit -l unlimited; docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
    return fail("memlock", f"{told}, and a KV pool has {pool_mib} MiB: RDMA cannot register it", advice)


def check_peer_memory(ports: Sequence[RdmaPort], *, gpu: bool, module: bool) -> Finding:
    """Check that RDMA reaches the memory of GPUs."""
    if not gpu:
        return skipped("peermem", "no GPU")
    if not any(port.active for port in ports):
        return skipped("peermem", "no active RDMA port")
    if module:
        return ok("peermem", "the kernel module is loaded")
    advice = "modprobe nvidia_peermem (not needed where driver and kernel offer dma-buf)"
    return warn("peermem", "nvidia_peermem is not loaded: RDMA may not reach GPU memory", advice)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
