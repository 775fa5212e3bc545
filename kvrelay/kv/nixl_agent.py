"""One NIXL agent with UCX behind it: the calls that kvrelay makes, and nothing else of NIXL.

It sits on the bindings, not on the Python class above them, for one reason: that class fixes the progress thread's
delay at 0, which keeps one core busy for each agent. With a delay the thread sleeps until there is something to do.
"""

import contextlib
import importlib
import logging
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, NewType

from kvrelay.engine.runner import KvMemory
from kvrelay.errors import InternalError
from kvrelay.kv.descriptors import Descriptors
from kvrelay.kv.transfer import ReadStats

Handle = NewType("Handle", int)

BACKEND: Final = "UCX"

MODULES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
"""Names under which wheels install NIXL; the first that is there is used."""

PROGRESS_DELAY_US: Final = 10_000
"""Longest sleep of the progress thread. Events wake it at once, so that this bounds idle work, not latency."""

RDMA_DEVICES: Final = Path("/sys/class/infiniband")


class Agent:
    """A NIXL agent over one pool's memory. A reading agent is used from one thread; a serving one needs none."""

    def __init__(self, name: str, memory: KvMemory) -> None:
        """Open the agent and register the memory.

        Raises:
            InternalError: NIXL is not installed or refuses the memory.
        """
        self.name = name
        self._nixl = load_bindings()
        self._transport = transport_name(os.environ)
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        config.pthrDelay = PROGRESS_DELAY_US
        config.captureTelemetry = True
        try:
            self._segment = getattr(self._nixl, f"{memory.memory}_SEG")
            self._agent = self._nixl.nixlAgent(name, config)
            self._agent.createBackend(BACKEND, {})
            region = (memory.base_address, memory.pages * memory.page_bytes, memory.device_id, "")
            self._agent.registerMem(self._nixl.nixlRegDList(self._segment, [region]), [])
        except Exception as error:
            raise InternalError(f"NIXL cannot use the KV pool's memory ({memory.memory}): {error}") from error

    def metadata(self) -> bytes:
        """Return what a peer needs to read from this memory."""
        return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> str:
        """Learn of a peer and return its agent name; knowing it already is no error. Any NIXL error may be raised."""
        name: bytes | str = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def disconnect(self, name: str) -> None:
        """Forget a peer; nothing may be under way to it."""
        with contextlib.suppress(Exception):  # unknown or disconnected already: the wanted outcome
            self._agent.invalidateRemoteMD(name)

    def prepare(self, peer: str, local: Descriptors, remote: Descriptors, remote_memory: str) -> Handle:
        """Prepare a READ; no byte moves yet. Any NIXL error may be raised."""
        nixl = self._nixl
        return Handle(
            self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(self._segment, local),
                nixl.nixlXferDList(getattr(nixl, f"{remote_memory}_SEG"), remote),
                peer,
                b"",
                [],
            )
        )

    def post(self, handle: Handle) -> bool:
        """Start a READ and tell whether it is done. Copies between processes of one machine happen in here."""
        return bool(self._agent.postXferReq(handle, b"") == self._nixl.NIXL_SUCCESS)

    def done(self, handle: Handle) -> bool:
        """Tell whether a READ is done. Raises what NIXL does when it has failed."""
        return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)

    def stats(self, handle: Handle) -> ReadStats:
        """Return what a READ that is done moved, by NIXL's own count."""
        told = self._agent.getXferTelemetry(handle)
        return ReadStats(int(told.totalBytes), int(told.descCount), int(told.xferDuration) / 1e6, self._transport)

    def release(self, handle: Handle) -> None:
        """Free a handle. The bytes of a READ that is not final may land until the agent is closed."""
        with contextlib.suppress(Exception):  # one that cannot be cancelled is freed with the agent
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Destroy the agent: connections close, and nothing lands in the memory by it any more."""
        self._agent = None

    def failure(self, error: Exception) -> str:
        """Return one word for an error that NIXL raised."""
        return "disconnected" if isinstance(error, self._nixl.nixlRemoteDisconnectError) else "transport"


def load_bindings() -> Any:
    """Import NIXL's bindings with the environment it needs.

    Raises:
        InternalError: NIXL is not installed.
    """
    prepare_environment(os.environ)
    for name in MODULES:
        try:
            bindings = importlib.import_module(f"{name}._bindings")
        except ImportError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            # NIXL logs to standard output, which belongs to the command line.
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return bindings
    raise InternalError("NIXL is not installed; install kvrelay[worker]")


def prepare_environment(environment: MutableMapping[str, str], rdma_devices: Path = RDMA_DEVICES) -> None:
    """Set what UCX reads from the environment, where the operator has not."""
    if not (rdma_devices.is_dir() and any(rdma_devices.iterdir())):
        # Where there is no RDMA device, UCX's module for them is of no use and crashes the process at its exit.
        environment.setdefault("UCX_MODULES", "^ib")
    environment.setdefault("UCX_LOG_FILE", "stderr")


def transport_name(environment: Mapping[str, str]) -> str:
    """Return the transport as far as it can be told: UCX chooses among those it is allowed, and does not say which."""
    allowed = environment.get("UCX_TLS", "all")
    return "ucx" if allowed == "all" else f"ucx:{allowed}"
