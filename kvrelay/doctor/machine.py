"""Checks of this machine, or of the container: shared memory, files, copies between processes, cores."""

import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvrelay.config import env_name, flag_name
from kvrelay.doctor.finding import Finding, ok, skipped, warn

MIB: Final = 1 << 20

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where the kernel has it, nothing is written there
SHARED_MEMORY_FREE_MIN: Final = 32 * MIB
"""UCX takes a few MiB a process; Docker's default of 64 MiB is shared with whatever else runs in the container."""

OPEN_FILES_MIN: Final = 4096
"""A replica has some twenty files a NIXL agent, a router a connection for each client and replica."""

PTRACE_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
PTRACE_ANYONE, PTRACE_ALLOWED_BY_UCX, PTRACE_PRIVILEGED = 0, 1, 2
"""Values of Yama's setting. At 1 UCX asks the kernel to let its peers in; at 2 a capability is needed; at 3 nothing
helps."""

CAP_SYS_PTRACE: Final = 19
"""Number of the capability (capabilities(7), linux/capability.h)."""

FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the machine's own PID namespace; the kernel fixes it."""

CONTAINER_SIGNS: Final = (Path("/.dockerenv"), Path("/run/.containerenv"))
QUOTAS: Final = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
PERIOD: Final = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What stands between two processes of one machine.

    Attributes:
        ptrace_scope: Yama's setting; None where there is no Yama.
        may_ptrace: whether this process has the capability.
        own_pid_namespace: whether this process has another PID namespace than the machine.
        container: what kind of container this is; empty: none that shows.
    """

    ptrace_scope: int | None
    may_ptrace: bool
    own_pid_namespace: bool
    container: str


def read_isolation(environment: Mapping[str, str]) -> Isolation:
    """Look at what stands between processes here."""
    scope = _number(PTRACE_SCOPE)
    try:
        own = Path("/proc/self/ns/pid").stat().st_ino != FIRST_PID_NAMESPACE
    except OSError:
        own = False
    return Isolation(
        ptrace_scope=None if scope is None else int(scope),
        may_ptrace=has_capability(CAP_SYS_PTRACE),
        own_pid_namespace=own,
        container=container_kind(environment),
    )


def container_kind(environment: Mapping[str, str], signs: Sequence[Path] = CONTAINER_SIGNS) -> str:
    """Return what kind of container this is; empty when none shows."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "a pod"
    return "a container" if any(sign.exists() for sign in signs) else ""


def has_capability(number: int, status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process has a capability in effect."""
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    told = next((line.partition(":")[2] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(told, 16) >> number & 1)


def quota_cores(quotas: Sequence[Path] = QUOTAS, period: Path = PERIOD) -> float | None:
    """Return how many cores' worth of time the container may use; None: as many as there are."""
    new, old = quotas
    if new.exists():
        quota, _, per = new.read_text(encoding="ascii").partition(" ")
        return None if quota == "max" else float(quota) / float(per)
    limit, per_us = _number(old), _number(period)
    return limit / per_us if limit and per_us and limit > 0 else None


def shared_memory_free(path: Path = SHARED_MEMORY) -> tuple[int, int] | None:
    """Return (free, total) bytes of shared memory; None where there is no such place."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free, usage.total


def open_files_limit() -> int | None:
    """Return how many files this process may open; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(command: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Return the compute threads that a replica's command line, or else its environment, sets; None: neither does."""
    flag = f"{flag_name('threads')}="
    given = next((word.removeprefix(flag) for word in command if word.startswith(flag)), None)
    told = given or environment.get(env_name("threads")) or environment.get("OMP_NUM_THREADS") or ""
    return int(told) if told.isdigit() and int(told) else None


def check_shared_memory(space: tuple[int, int] | None) -> Finding:
    """Check that there is room for UCX's shared memory; `space`: (free, total) bytes."""
    if space is None:
        return skipped("shared memory", f"no {SHARED_MEMORY} here")
    free, total = space
    found = f"{free / MIB:.0f} of {total / MIB:.0f} MiB free in {SHARED_MEMORY}"
    if free < SHARED_MEMORY_FREE_MIN:
        return warn("shared memory", found, f"free {SHARED_MEMORY}; docker: --shm-size 1g; pods: an emptyDir in memory")
    return ok("shared memory", found)


def check_open_files(limit: int | None) -> Finding:
    """Check how many files a process may open."""
    if limit is not None and limit < OPEN_FILES_MIN:
        return warn("open files", f"at most {limit}", f"ulimit -n {OPEN_FILES_MIN} or more, before starting kvrelay")
    return ok("open files", "unlimited" if limit is None else f"at most {limit}")


def check_cma(isolation: Isolation) -> Finding:
    """Check that processes of this machine may copy from each other's memory, which is how KV moves within it."""
    scope, where = isolation.ptrace_scope, isolation.container
    seen = f"ptrace_scope {'absent' if scope is None else scope}" + (f", in {where}" if where else "")
    allowed = scope in {None, PTRACE_ANYONE, PTRACE_ALLOWED_BY_UCX} or (
        scope == PTRACE_PRIVILEGED and isolation.may_ptrace
    )
    if not allowed:
        advice = "sysctl kernel.yama.ptrace_scope=1, or give replicas CAP_SYS_PTRACE (docker: --cap-add SYS_PTRACE)"
        return warn("cma", f"{seen}: no copy between processes, KV within this machine goes over TCP", advice)
    if isolation.own_pid_namespace:
        advice = "for several containers of one machine: pid: host (docker --pid host), or one container for them all"
        return warn("cma", f"{seen}; a PID namespace of its own: processes outside it are reached over TCP", advice)
    return ok("cma", f"{seen}; the machine's own PID namespace")


def check_cores(here: int, quota: float | None, threads: Mapping[str, int | None]) -> Finding:
    """Check compute threads against cores.

    Args:
        here: cores that processes may run on.
        quota: cores' worth of time that the container may use; None: no limit.
        threads: compute threads of the replicas here, or of one to be started, by name; None: not set.
    """
    found = f"{here} cores" + (f", {quota:g} cores' worth of time" if quota is not None else "")
    total = sum(count or 0 for count in threads.values())
    told = ", ".join(f"{name} {count}" for name, count in threads.items() if count is not None)
    found += f"; threads: {told}" if told else ""
    usable = here if quota is None else min(here, quota)
    if total > max(1, usable):
        fewer = f"set {flag_name('threads')} to the cores divided by the replicas that share them"
        crowded = all(count == 1 for count in threads.values())
        return warn("cores", found, "run fewer replicas here: they wait for each other's cores" if crowded else fewer)
    if quota is not None and quota < here and not total:
        return warn("cores", found, f"set {flag_name('threads')}: without it replicas start a thread a core")
    return ok("cores", found)


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
