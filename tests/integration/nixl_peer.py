"""A process that owns KV memory and serves it over NIXL, and the other end of its pipe for the tests."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvrelay.engine.protocol import AgentInfo
from kvrelay.kv.nixl import NixlTransfer
from kvrelay.types import KvLayout

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 0.5


def page_of(seed: int, page: int, page_bytes: int) -> np.ndarray:
    """Bytes of a page, different for every seed and page."""
    return np.random.default_rng((seed, page)).integers(1, 256, page_bytes, dtype=np.uint8)


def layout_of(page_bytes: int) -> KvLayout:
    return KvLayout(
        layers=1,
        kv_heads=1,
        head_dim=page_bytes // 128,
        dtype="float32",
        page_tokens=16,
        block_tokens=16,
        page_bytes=page_bytes,
    )


class Pool:
    """Memory of some pages with a transfer over it."""

    def __init__(self, name: str, *, pages: int, page_bytes: int, seed: int | None = None) -> None:
        self.memory = np.zeros((pages, page_bytes), dtype=np.uint8)
        self.memory[:] = 0  # prefault
        if seed is not None:
            for page in range(pages):
                self.memory[page] = page_of(seed, page, page_bytes)
        self.transfer = NixlTransfer(agent_name=name, close_timeout_s=CLOSE_TIMEOUT_S)
        self.transfer.register(
            base_address=self.memory.ctypes.data, pages=pages, page_bytes=page_bytes, memory="DRAM", device_id=0
        )

    def info(self) -> AgentInfo:
        name, metadata = self.transfer.agent()
        return AgentInfo(
            replica_id="peer",
            incarnation=name,
            agent_name=name,
            agent_metadata=metadata,
            base_address=self.memory.ctypes.data,
            pages=len(self.memory),
            layout=layout_of(self.memory.shape[1]),
        )


@dataclass
class Child:
    """A running peer."""

    process: subprocess.Popen
    info: AgentInfo

    @classmethod
    def start(cls, *, pages: int, page_bytes: int, seed: int, environment: dict[str, str] | None = None) -> "Child":
        arguments = [sys.executable, __file__, str(pages), str(page_bytes), str(seed)]
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | (environment or {}),
            text=True,
        )
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line, "the peer did not start"
        told = json.loads(line)
        told["agent_metadata"] = bytes.fromhex(told["agent_metadata"])
        return cls(process, AgentInfo(**told, layout=layout_of(page_bytes)))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    def end(self) -> None:
        """Kill it if it still runs, and close the pipes."""
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def main() -> None:
    # The peer must not outlive a test that dies.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    pages, page_bytes, seed = map(int, sys.argv[1:])
    pool = Pool(f"peer-{os.getpid()}-{os.urandom(4).hex()}", pages=pages, page_bytes=page_bytes, seed=seed)
    info = pool.info()
    told = {name: getattr(info, name) for name in AgentInfo.__slots__ if name != "layout"}
    told["agent_metadata"] = info.agent_metadata.hex()
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    pool.transfer.close()


if __name__ == "__main__":
    main()
