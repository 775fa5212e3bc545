"""Checks of the network: interfaces, the address to advertise, the addresses that replicas advertise."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvrelay.doctor import ucx
from kvrelay.doctor.finding import Finding, fail, ok, skipped, warn
from kvrelay.errors import InvalidArgument
from kvrelay.rpc import address

INTERFACES: Final = Path("/sys/class/net")
LOOPBACK: Final = "lo"
SLOW_MBIT: Final = 1000
"""At 1 Gbit/s the KV of a 4,096-token prompt of even a small model (94 MB) takes most of a second."""

CONNECT_TIMEOUT_S: Final = 3.0
"""A TCP connection within a data centre takes a millisecond; one lost packet costs a second."""


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface; `mbit` is None when the driver does not tell (virtual ones mostly do not)."""

    name: str
    up: bool
    mbit: int | None

    def __str__(self) -> str:
        if self.mbit is None:
            return f"{self.name} (speed not told)"
        return f"{self.name} {self.mbit / 1000:g} Gbit/s ({self.mbit / 8000:.2g} GB/s)"


def read_nics(root: Path = INTERFACES) -> list[Nic]:
    """Return the network interfaces but loopback."""
    if not root.is_dir():
        return []
    folders = [folder for folder in sorted(root.iterdir()) if folder.name != LOOPBACK and folder.is_dir()]
    return [Nic(folder.name, _text(folder / "operstate") == "up", _speed(folder / "speed")) for folder in folders]


def is_own(host: str) -> bool | None:
    """Whether a host name or IP address is one of this machine; None: it does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, _, _, where in found:
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.bind(where)
            return True
    return False


async def connect(where: str, timeout_s: float = CONNECT_TIMEOUT_S) -> str:
    """Open and close a TCP connection to "host:port"; return why it failed, empty when it did not."""
    host, _, port = where.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no connection within {timeout_s:g} s"
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    writer.close()
    return ""


def check_nics(nics: Sequence[Nic], environment: Mapping[str, str], rdma_devices: Sequence[str]) -> Finding:
    """Check the interfaces that KV may travel over."""
    unknown = ucx.unknown_devices(environment, frozenset([*(nic.name for nic in nics), *rdma_devices, LOOPBACK]))
    if unknown:
        advice = f"UCX_NET_DEVICES may name {', '.join([nic.name for nic in nics] + list(rdma_devices))}"
        return fail("nics", f"UCX_NET_DEVICES names {', '.join(unknown)}, which is not here", advice)
    up = [nic for nic in nics if nic.up]
    if not up:
        return skipped("nics", "no interface is up but loopback: this machine serves itself alone")
    found = ", ".join(str(nic) for nic in up)
    speeds = [nic.mbit for nic in up if nic.mbit is not None]
    if speeds and max(speeds) < SLOW_MBIT and not rdma_devices:
        return warn("nics", found, "use a faster network between machines, or --disaggregate never across them")
    return ok("nics", found)


def check_advertise(bind: str, advertise: str, own: Callable[[str], bool | None] = is_own) -> Finding:
    """Check what a process with these flags would tell others."""
    try:
        host = address.advertised_host(bind, advertise)
    except InvalidArgument as error:
        return fail("advertise", f"--bind {bind}: {error.description}", "set --advertise to this machine's name or IP")
    if address.is_loopback(host):
        return ok("advertise", f"{host}: reached from this machine alone (--bind and --advertise for several)")
    known = own(host)
    if known is None:
        return fail("advertise", f"{host} does not resolve", "set --advertise to a name or IP that others resolve")
    if not known:
        advice = "make sure that it is forwarded here, or set --advertise to an address of this machine"
        return warn("advertise", f"{host} is no address of this machine", advice)
    return ok("advertise", f"{host} is an address of this machine")


def check_addresses(replicas: Mapping[str, str], refused: Mapping[str, str]) -> Finding:
    """Check the addresses that replicas advertise.

    Args:
        replicas: "host:port" by replica id.
        refused: why no connection could be opened, by replica id.
    """
    local = [name for name, where in replicas.items() if address.is_loopback(_host(where))]
    if local and len(local) < len(replicas):
        advice = "start them with --bind 0.0.0.0 --advertise HOST: the others live on another address"
        return fail("addresses", f"{', '.join(local)} advertise loopback, reached from their machine alone", advice)
    if refused:
        found = "; ".join(f"{name} at {replicas[name]}: {why}" for name, why in refused.items())
        return fail("addresses", found, "check that it runs, its --advertise, and firewalls between here and there")
    hosts = sorted({_host(where) for where in replicas.values()})
    return ok("addresses", f"{len(replicas)} replicas reached on {', '.join(hosts)}")


def _host(where: str) -> str:
    return where.rpartition(":")[0]


def _speed(path: Path) -> int | None:
    told = _text(path)
    return int(told) if told.isdigit() and int(told) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
