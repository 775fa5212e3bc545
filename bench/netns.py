"""Two hosts on one machine: network namespaces joined by a link that can be slowed. Linux, as root, with iproute2."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

COMMAND_TIMEOUT_S: Final = 30.0
"""Longest wait for `ip` or `tc`; they take milliseconds, and longer only while the kernel takes namespaces apart."""

LINK_ADDRESSES: Final = {"a": "198.18.0.1", "b": "198.18.0.2"}
"""Ends of the link, in the range set aside for benchmarks (RFC 2544); seen in the two namespaces only."""

BURST_BYTES: Final = 512 * 1024
"""Bytes that a slowed link passes at once: more than the largest packet of a virtual link, little beside a pull."""

QUEUE_MS: Final = 50
"""Longest wait in a slowed link's queue, as in the buffer of a switch; what comes on top is dropped."""


class NotPossibleError(Exception):
    """This machine or user cannot make namespaces; the message says what is missing."""


def check() -> None:
    """Check that namespaces can be made here.

    Raises:
        NotPossibleError: they cannot.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NotPossibleError(f"needs {' and '.join(missing)}: install iproute2 (Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        raise NotPossibleError("makes network namespaces, which needs root")


class TwoHosts:
    """Namespaces "a" and "b" with a link between them, and a link by which this process reaches "b".

    A context manager: leaving it removes everything, whatever went wrong. End the processes inside before.

    Attributes:
        address: address of each namespace on the link between them.
        device: device of the link in each namespace.
        entrance: address by which this process reaches "b".
    """

    def __init__(self) -> None:
        run = secrets.token_hex(3)
        self.address = LINK_ADDRESSES
        self.device = {end: f"kv{run}{end}" for end in ("a", "b")}
        self._names = {end: f"kvrelay-{run}-{end}" for end in ("a", "b")}
        self._way_in = (f"kv{run}o", f"kv{run}i")
        # One of 16,384 networks of four addresses, so that runs beside each other do not meet.
        network = secrets.randbelow(1 << 14)
        self._base = f"198.19.{network >> 6}.{(network & 63) * 4}".rpartition(".")
        self.entrance = self._host(2)

    def __enter__(self) -> Self:
        check()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, end: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one in a namespace; it becomes that one."""
        return [str(shutil.which("ip")), "netns", "exec", self._names[end], *command]

    def slow(self, bytes_per_s: float) -> None:
        """Let the link carry no more than this from "a" to "b"."""
        shape = f"rate {int(bytes_per_s * 8)}bit burst {BURST_BYTES} latency {QUEUE_MS}ms"
        self._tc("a", f"qdisc replace dev {self.device['a']} root tbf {shape}")

    def free(self) -> None:
        """Let the link carry what it can."""
        self._tc("a", f"qdisc del dev {self.device['a']} root")

    def _make(self) -> None:
        for name in self._names.values():
            _run(f"ip netns add {name}")
        a, b = self._names["a"], self._names["b"]
        _run(f"ip -n {a} link add {self.device['a']} type veth peer name {self.device['b']} netns {b}")
        for end, name in self._names.items():
            self._give(f"ip -n {name}", self.device[end], f"{self.address[end]}/30")
            _run(f"ip -n {name} link set lo up")
        outside, inside = self._way_in
        _run(f"ip link add {outside} type veth peer name {inside} netns {b}")
        self._give("ip", outside, f"{self._host(1)}/30")
        self._give(f"ip -n {b}", inside, f"{self.entrance}/30")

    def _give(self, ip: str, device: str, address: str) -> None:
        _run(f"{ip} address add {address} dev {device}")
        _run(f"{ip} link set {device} up")

    def _remove(self) -> None:
        # The kernel takes a namespace's links away too, but in its own time; the one that others see goes now.
        _run(f"ip link del {self._way_in[0]}", check=False)
        for name in self._names.values():
            _run(f"ip netns del {name}", check=False)

    def _tc(self, end: str, arguments: str) -> None:
        _run(f"tc -n {self._names[end]} {arguments}")

    def _host(self, number: int) -> str:
        network, _, first = self._base
        return f"{network}.{int(first) + number}"


def _run(command: str, *, check: bool = True) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    if check and done.returncode:
        raise NotPossibleError(f"{command!r} failed: {done.stderr.strip() or done.stdout.strip()}")
