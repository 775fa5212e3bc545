"""A fleet on this machine, started by `kvrelay up` as a user would, for benchmarks and end-to-end tests."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from kvrelay.client import Client, ReplicaStatus
from kvrelay.errors import KvrelayError
from kvrelay.up.state import ChildRecord, FleetRecord, StateFile

START_TIMEOUT_S = 180.0
"""Ten times what a fleet of four replicas on two cores takes."""
STOP_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05

T = TypeVar("T")


def wait_for(what: str, condition: Callable[[], T], *, timeout_s: float = 60.0) -> T:
    """Return the first true value of a condition.

    Raises:
        TimeoutError: it did not become true in time; names what was waited for and what was seen last.
    """
    end = time.monotonic() + timeout_s
    while True:
        seen = condition()
        if seen:
            return seen
        if time.monotonic() > end:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}; last seen: {seen!r}")
        time.sleep(POLL_INTERVAL_S)


class LocalFleet:
    """Runs `kvrelay up --ports free` in a folder of its own; a context manager.

    Args:
        flags: of `kvrelay up`, such as {"prefill": 2, "engine": "mock"}.
        env: added to the environment of the fleet's processes.
    """

    def __init__(self, flags: dict[str, object] | None = None, env: dict[str, str] | None = None) -> None:
        self._flags = {"ports": "free", "log_format": "json"} | (flags or {})
        self._env = os.environ | (env or {})
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-fleet-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.log = self.folder / "up.log"
        self._state = StateFile(self.folder)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log.read_text()[-20_000:], file=sys.stderr)
        self.stop()

    def start(self) -> None:
        """Start the fleet; returns when every replica is ready and the router knows it.

        Raises:
            RuntimeError: it ended instead.
            TimeoutError: it did not get there.
        """
        flags = [part for name, value in self._flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "kvrelay.cli.main", "up", "--state-dir", str(self.folder), *flags]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._env, cwd=self.folder)
        try:
            wait_for("the fleet to be ready", self._ready, timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Drain the fleet as Ctrl-C does; return the exit code of `kvrelay up`."""
        if self._process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        try:
            return self._process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=STOP_TIMEOUT_S)
            raise
        finally:
            self._process = None
            self._folder.cleanup()

    @property
    def record(self) -> FleetRecord:
        """The fleet's processes, as `kvrelay up` wrote them down."""
        return self._state.read()

    @property
    def router(self) -> str:
        """The router's address."""
        return self.record.router

    def child(self, name: str) -> ChildRecord:
        """Return one process by name, such as "prefill-0"."""
        return next(child for child in self.record.children if child.name == name)

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """Open a blocking client of the fleet's router."""
        with Client(self.router) as client:
            yield client

    def replicas(self) -> dict[str, ReplicaStatus]:
        """Return what the router knows of the replicas, by id; empty while it does not answer."""
        try:
            with self.client() as client:
                return {status.peer.replica_id: status for status in client.status().replicas}
        except KvrelayError:
            return {}

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"kvrelay up ended with {self._process.returncode}:\n{self.log.read_text()[-4000:]}")
        wanted = sum(
            int(str(self._flags.get(role, default))) for role, default in (("prefill", 1), ("decode", 1), ("both", 0))
        )
        if "fleet ready" not in self.log.read_text(errors="replace"):
            return False
        return sum(status.state == "ready" for status in self.replicas().values()) == wanted
