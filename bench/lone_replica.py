"""One replica process without registry or router, for benchmarks that speak with replicas themselves."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bench.local_fleet import wait_for
from kvrelay.types import Peer
from kvrelay.up import leash

START_TIMEOUT_S: Final = 60.0
"""Ten times what a mock replica takes on a busy machine."""
STOP_TIMEOUT_S: Final = 15.0
LOG_TAIL_CHARACTERS: Final = 4000


class LoneReplica:
    """Runs `kvrelay replica`; a context manager. It dies with this process.

    Args:
        flags: of `kvrelay replica`, such as {"role": "prefill", "engine": "mock"}.
        log: file for what it prints.
        env: added to its environment.
        within: turns its command into the one to run, such as one in a network namespace.
    """

    def __init__(
        self,
        flags: dict[str, object],
        log: Path,
        *,
        env: dict[str, str] | None = None,
        within: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        self._flags = {"registry": "", "port": 0} | flags
        self._log = log
        self._env = os.environ | (env or {})
        self._within = within
        self._process: subprocess.Popen[bytes] | None = None
        self._peer: Peer | None = None

    @property
    def peer(self) -> Peer:
        """Who it is to others; waits until it is ready, so that several can start beside each other.

        Raises:
            RuntimeError: it ended instead.
            TimeoutError: it did not get there.
        """
        if self._peer is None:
            self._peer = wait_for("a replica to be ready", self._ready, timeout_s=START_TIMEOUT_S)
        assert self._peer is not None
        return self._peer

    def __enter__(self) -> Self:
        flags = [part for name, value in self._flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = self._within([sys.executable, "-m", "kvrelay.cli.main", "replica", *flags])
        tied = [sys.executable, "-S", "-E", str(Path(leash.__file__)), str(os.getpid()), *command]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(tied, stdout=log, stderr=log, env=self._env)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self._tail(), file=sys.stderr)
        self.stop()

    def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=STOP_TIMEOUT_S)
        self._process = None

    def _ready(self) -> Peer | None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the replica ended with {self._process.returncode}:\n{self._tail()}")
        for line in self._log.read_text(errors="replace").splitlines():
            if '"replica_ready"' in line:
                told = json.loads(line)
                return Peer(told["replica_id"], told["incarnation"], told["address"])
        return None

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
