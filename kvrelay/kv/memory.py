"""A transfer between pools of one process, for tests and simulated faults: a READ is a copy."""

import ctypes
from dataclasses import dataclass, field

from kvrelay.engine.protocol import AgentInfo
from kvrelay.kv.transfer import Read, ReadState, ReadStats

TRANSPORT = "memory"
GONE = "disconnected"


@dataclass(slots=True)
class MemoryNetwork:
    """Which ends are there; each process has as many networks as it makes."""

    agents: set[str] = field(default_factory=set)


class MemoryRead:
    """A read that was over when it was posted; of a peer that is gone it FAILED."""

    def __init__(self, state: ReadState, stats: ReadStats) -> None:
        self._state = state
        self._stats = stats

    def state(self) -> ReadState:
        """Return DONE, or FAILED."""
        return self._state

    def reason(self) -> str:
        """Return why it FAILED."""
        return GONE if self._state is ReadState.FAILED else ""

    def stats(self) -> ReadStats:
        """Return what was copied."""
        return self._stats

    def close(self) -> None:
        """Do nothing: there is no handle."""


class MemoryTransfer:
    """One end of a network; implements `kvrelay.kv.transfer.Transfer`."""

    def __init__(self, network: MemoryNetwork, agent_name: str) -> None:
        self._network = network
        self._name = agent_name
        self._base_address = self._page_bytes = 0

    def register(self, *, base_address: int, pages: int, page_bytes: int, memory: str, device_id: int) -> None:  # noqa: ARG002 - as in the protocol
        """Note where the pool lies, and join the network."""
        self._base_address, self._page_bytes = base_address, page_bytes
        self._network.agents.add(self._name)

    def agent(self) -> tuple[str, bytes]:
        """Return the name; there is no metadata."""
        return self._name, b""

    def read(self, source: AgentInfo, *, remote_pages: list[int], local_pages: list[int]) -> Read:
        """Copy now."""
        if source.agent_name not in self._network.agents:
            return MemoryRead(ReadState.FAILED, ReadStats(0, 0, 0.0, TRANSPORT))
        size = self._page_bytes
        for remote, local in zip(remote_pages, local_pages, strict=True):
            ctypes.memmove(self._base_address + local * size, source.base_address + remote * size, size)
        return MemoryRead(ReadState.DONE, ReadStats(size * len(local_pages), len(local_pages), 0.0, TRANSPORT))

    def abandon(self, read: Read) -> None:
        """Do nothing: every read is over."""

    def forget(self, agent_name: str) -> None:
        """Do nothing: a peer that is gone is not read from."""

    def close(self) -> None:
        """Leave the network."""
        self._network.agents.discard(self._name)
