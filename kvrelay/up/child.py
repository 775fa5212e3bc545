"""One child process: started on a leash, its output pumped line by line, ended with its whole process group."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvrelay.up import leash
from kvrelay.up.plan import ChildSpec
from kvrelay.up.processes import start_ticks

LINE_BYTES_MAX = 64 * 1024
"""Longer lines are dropped, so that no child makes its supervisor grow."""

LAST_LINES = 15
"""Lines kept to explain a death."""

PUMP_TIMEOUT_S = 2.0
"""After a child's death its grandchildren may hold its output open; its last lines have long been read by then."""


class Child:
    """A running child process. Made by `start`."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.pid = process.pid
        self.start_ticks = start_ticks(process.pid)
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = process
        self._log = log
        self._pump = asyncio.create_task(self._pump_lines())

    @classmethod
    async def start(cls, spec: ChildSpec, log: Callable[[str, str], None]) -> "Child":
        """Start a child; `log(name, line)` gets what it prints.

        In a session of its own: Ctrl-C in the terminal reaches only the supervisor, which ends the others in order. Its
        leash is tied to the calling thread, which must live as long as the supervisor: call it from the main thread.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-E", str(Path(leash.__file__)), str(os.getpid()), *spec.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=LINE_BYTES_MAX,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        return cls(spec, process, log)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end and its last lines; return its exit code, minus the signal's number if one killed it."""
        code = await self._process.wait()
        await asyncio.wait({self._pump}, timeout=PUMP_TIMEOUT_S)
        self._pump.cancel()
        return code

    def drain(self) -> None:
        """Ask it to finish its work and end."""
        if self.running:
            # Not `terminate()`: it may reap the process before the event loop does, and its exit code would be lost.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it has started, now."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _pump_lines(self) -> None:
        output = self._process.stdout
        assert output is not None
        while True:
            try:
                raw = await output.readline()
            except ValueError:
                raw = b"(a line over 64 KiB was dropped)\n"
            if not raw:
                return
            line = raw.decode("utf-8", errors="replace").rstrip()
            self.last_lines.append(line)
            self._log(self.spec.name, line)


def describe_exit(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
