"""A READ under way over NIXL, as the engine thread sees it."""

import math

from kvrelay.engine.protocol import AgentInfo
from kvrelay.kv.descriptors import Runs
from kvrelay.kv.transfer import ReadState, ReadStats


class NixlRead:
    """A READ of runs of pages; implements `kvrelay.kv.transfer.Read`.

    The engine thread looks at it; only the endpoint's thread calls `finish` and `fail`.

    Attributes:
        source: the peer that is read from.
        runs: what is read.
        endpoint_name: the endpoint that reads.
        abandoned_at_s: when it was given up, on the endpoint's clock; -inf when its peer has been forgotten.
    """

    def __init__(self, source: AgentInfo, runs: Runs, endpoint_name: str) -> None:
        self.source = source
        self.runs = runs
        self.endpoint_name = endpoint_name
        self.abandoned_at_s: float | None = None
        self._state = ReadState.PENDING
        self._reason = ""
        self._stats: ReadStats | None = None

    def state(self) -> ReadState:
        """Return the state now."""
        return self._state

    def reason(self) -> str:
        """Return why it FAILED: busy, unreachable, disconnected, short, transport, abandoned, forgotten or closed."""
        return self._reason

    def stats(self) -> ReadStats:
        """Return what was moved, by NIXL's own count."""
        assert self._stats is not None, "stats of a read that is not done"
        return self._stats

    def close(self) -> None:
        """Check that the state is final: the handle was given back when it became so."""
        assert self._state is not ReadState.PENDING, "closed a read that may still land"

    @property
    def given_up_reason(self) -> str:
        """Why nobody waits for it any more; empty while somebody does."""
        if self.abandoned_at_s is None:
            return ""
        return "forgotten" if self.abandoned_at_s == -math.inf else "abandoned"

    def finish(self, stats: ReadStats) -> None:
        """Turn DONE."""
        self._stats = stats
        self._state = ReadState.DONE

    def fail(self, reason: str) -> None:
        """Turn FAILED."""
        self._reason = reason
        self._state = ReadState.FAILED
