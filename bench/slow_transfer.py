"""A transfer that takes its time: what a slower network or tier looks like to the one that reads from it."""

import time
from dataclasses import dataclass

from kvrelay.engine.protocol import AgentInfo
from kvrelay.kv.transfer import Read, ReadState, ReadStats, Transfer


@dataclass(slots=True)
class Slowness:
    """How slow; may be changed between reads.

    Attributes:
        latency_s: added to each read, s.
        bytes_per_s: most bytes that a read moves in a second.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")


class SlowRead:
    """A read that is done when its bytes are here and its time is over."""

    def __init__(self, inner: Read, done_at_s: float) -> None:
        self.inner = inner
        self._done_at_s = done_at_s

    def state(self) -> ReadState:
        """Return the state now."""
        return ReadState.PENDING if time.monotonic() < self._done_at_s else self.inner.state()

    def reason(self) -> str:
        """Return why it FAILED."""
        return self.inner.reason()

    def stats(self) -> ReadStats:
        """Return what was moved."""
        return self.inner.stats()

    def close(self) -> None:
        """Give the handle back."""
        self.inner.close()


class SlowTransfer:
    """Wraps a transfer; implements `kvrelay.kv.transfer.Transfer`."""

    def __init__(self, inner: Transfer, slowness: Slowness) -> None:
        self._inner = inner
        self._slowness = slowness
        self._page_bytes = 0

    def register(self, *, base_address: int, pages: int, page_bytes: int, memory: str, device_id: int) -> None:
        """Pass through."""
        self._page_bytes = page_bytes
        self._inner.register(
            base_address=base_address, pages=pages, page_bytes=page_bytes, memory=memory, device_id=device_id
        )

    def agent(self) -> tuple[str, bytes]:
        """Pass through."""
        return self._inner.agent()

    def read(self, source: AgentInfo, *, remote_pages: list[int], local_pages: list[int]) -> SlowRead:
        """Post a read that is done in its time."""
        took_s = self._slowness.latency_s + len(local_pages) * self._page_bytes / self._slowness.bytes_per_s
        done_at_s = time.monotonic() + took_s
        return SlowRead(self._inner.read(source, remote_pages=remote_pages, local_pages=local_pages), done_at_s)

    def abandon(self, read: Read) -> None:
        """Pass through."""
        assert isinstance(read, SlowRead)
        self._inner.abandon(read.inner)

    def forget(self, agent_name: str) -> None:
        """Pass through."""
        self._inner.forget(agent_name)

    def close(self) -> None:
        """Pass through."""
        self._inner.close()
