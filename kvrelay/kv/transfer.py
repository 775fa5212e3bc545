"""Moving pages between replicas: the protocol that NIXL and the fault transport both speak."""

import enum
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.protocol import AgentInfo


class ReadState(enum.Enum):
    """Where a READ stands."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What one READ moved."""

    bytes: int
    descriptors: int
    elapsed_s: float
    transport: str


class Read(Protocol):
    """A READ under way. Its local pages belong to it until `state()` is final."""

    def state(self) -> ReadState:
        """Return the state now, without blocking; DONE and FAILED are final."""
        ...

    def reason(self) -> str:
        """Return one word for why it FAILED, such as "disconnected"; empty otherwise."""
        ...

    def stats(self) -> ReadStats:
        """Return what was moved; only of a DONE read."""
        ...

    def close(self) -> None:
        """Give the handle back; only of a read whose state is final (an abandoned one may still land)."""
        ...


class Transfer(Protocol):
    """One replica's end of the KV network. Used from the engine thread."""

    def register(self, *, base_address: int, pages: int, page_bytes: int, memory: str, device_id: int) -> None:
        """Register the pool's memory; once, before anything else.

        Raises:
            InternalError: the transport refuses the memory.
        """
        ...

    def agent(self) -> tuple[str, bytes]:
        """Return this end's agent name (new at every start) and its metadata, for `AgentInfo`."""
        ...

    def read(self, source: AgentInfo, *, remote_pages: list[int], local_pages: list[int]) -> Read:
        """Post a READ of whole pages, remote_pages[i] into local_pages[i]; never blocks on the peer.

        Runs that are consecutive on both sides become one descriptor. Connecting to a new peer happens on the way.
        A peer that cannot be reached gives a Read that turns FAILED; this raises only for wrong arguments.
        """
        ...

    def abandon(self, read: Read) -> None:
        """Give up on a PENDING read: its pages stay in quarantine until its `state()` is final (poll it still).

        New reads from that peer go through a fresh agent; the old one ends when all its reads have ended.
        """
        ...

    def forget(self, agent_name: str) -> None:
        """Drop what is known of a peer that has gone; its pending reads turn FAILED."""
        ...

    def close(self) -> None:
        """Wait for posted reads up to a bound, then close."""
        ...
