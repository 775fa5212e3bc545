"""The probe of READ bandwidth: reads from another process of this machine. Run as a process; prints a JSON object.

It starts the other process itself, on a leash, so that none is left behind whatever happens.
"""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvrelay.engine.protocol import AgentInfo
from kvrelay.kv.nixl import NixlTransfer
from kvrelay.kv.transfer import ReadState
from kvrelay.types import KvLayout
from kvrelay.up import leash

PAGES: Final = 16
PAGE_BYTES: Final = 4 << 20
"""16 pages of 4 MiB: 64 MiB, the KV of some 3,000 tokens of a small model, read as one run."""

TRIES: Final = 5
"""The best counts: the first one meets cold memory, and any may meet a busy machine."""

ROW: Final = 4096
READ_TIMEOUT_S: Final = 10.0
"""64 MiB take a second on a bad network."""
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 2.0
POLL_INTERVAL_S: Final = 0.0002
OWNER: Final = "owner"

LAYOUT: Final = KvLayout(
    layers=1,
    kv_heads=1,
    head_dim=PAGE_BYTES // 128,
    dtype="float32",
    page_tokens=16,
    block_tokens=16,
    page_bytes=PAGE_BYTES,
)


class ProbeFailed(Exception):
    """The measurement could not be made; says why."""


class Pool:
    """Memory of some pages, filled with a pattern or empty, with a transfer over it."""

    def __init__(self, name: str, *, filled: bool) -> None:
        self.memory: npt.NDArray[np.uint8] = np.zeros((PAGES, PAGE_BYTES), dtype=np.uint8)
        self.memory[:] = pattern() if filled else 0  # either way every page of memory is touched
        self.transfer = NixlTransfer(agent_name=f"{name}-{os.urandom(8).hex()}", close_timeout_s=STOP_TIMEOUT_S)
        self.transfer.register(
            base_address=self.memory.ctypes.data, pages=PAGES, page_bytes=PAGE_BYTES, memory="DRAM", device_id=0
        )

    def told(self) -> dict[str, Any]:
        """Return what a reader needs, for JSON."""
        name, metadata = self.transfer.agent()
        return {"name": name, "metadata": metadata.hex(), "address": self.memory.ctypes.data}


def pattern() -> npt.NDArray[np.uint8]:
    """Return the bytes of all pages: each row begins with its number."""
    numbers = np.arange(PAGES * PAGE_BYTES // ROW, dtype=np.uint64)
    rows = np.zeros((len(numbers), ROW // 8), dtype=np.uint64)
    rows[:, 0] = numbers + 1
    return rows.view(np.uint8).reshape(PAGES, PAGE_BYTES)


def own() -> None:
    """Own memory until standard input ends."""
    pool = Pool("doctor-owner", filled=True)
    print(json.dumps(pool.told()), flush=True)  # noqa: T201 - this is how the owner answers
    sys.stdin.read()
    pool.transfer.close()


def measure() -> dict[str, Any]:
    """Read from an owner several times; return the best times.

    Raises:
        ProbeFailed: the owner did not start, or a READ failed or brought wrong bytes.
        KvrelayError: NIXL is not installed or refuses the memory.
    """
    owner = _start_owner()
    try:
        source = _source(owner)
        pool = Pool("doctor-reader", filled=False)
        read_s = min(_timed_read(pool, source) for _ in range(TRIES))
        whole = pattern()
        if not np.array_equal(pool.memory, whole):
            raise ProbeFailed("the bytes read are not those of the owner")
        copy_s = min(_timed_copy(pool.memory, whole) for _ in range(TRIES))
        pool.transfer.close()
    finally:
        owner.kill()
        owner.wait(STOP_TIMEOUT_S)
    return {"bytes": PAGES * PAGE_BYTES, "read_s": read_s, "copy_s": copy_s, "memory": "DRAM"}


def _start_owner() -> "subprocess.Popen[bytes]":
    program = [sys.executable, "-P", "-m", "kvrelay.doctor.bandwidth", OWNER]
    command = [sys.executable, "-S", "-E", str(Path(leash.__file__)), str(os.getpid()), *program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _source(owner: "subprocess.Popen[bytes]") -> AgentInfo:
    output = owner.stdout
    assert output is not None
    if not select.select([output], [], [], START_TIMEOUT_S)[0]:
        raise ProbeFailed(f"the process that owns the memory was not ready within {START_TIMEOUT_S:g} s")
    line = output.readline()
    if not line:
        raise ProbeFailed("the process that owns the memory did not start")
    told = json.loads(line)
    return AgentInfo(
        replica_id="doctor-owner",
        incarnation=told["name"],
        agent_name=told["name"],
        agent_metadata=bytes.fromhex(told["metadata"]),
        base_address=told["address"],
        pages=PAGES,
        layout=LAYOUT,
    )


def _timed_read(pool: Pool, source: AgentInfo) -> float:
    pages = list(range(PAGES))
    started_s = time.perf_counter()
    read = pool.transfer.read(source, remote_pages=pages, local_pages=pages)
    while read.state() is ReadState.PENDING:
        if time.perf_counter() - started_s > READ_TIMEOUT_S:
            raise ProbeFailed(f"a READ was not done within {READ_TIMEOUT_S:g} s")
        time.sleep(POLL_INTERVAL_S)
    if read.state() is ReadState.FAILED:
        raise ProbeFailed(f"a READ failed: {read.reason()}")
    # NIXL's own time, without the thread that posts it: what the path can do.
    elapsed_s = read.stats().elapsed_s
    read.close()
    return elapsed_s or time.perf_counter() - started_s


def _timed_copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> float:
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


def main() -> int:
    """Own memory, or measure and tell the outcome."""
    if sys.argv[1:] == [OWNER]:
        own()
        return 0
    try:
        told = measure()
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is the finding
        told = {"error": " ".join(f"{error}".split()) or type(error).__name__}
    print(json.dumps(told), flush=True)  # noqa: T201 - this is how a probe answers
    return 0


if __name__ == "__main__":
    sys.exit(main())
