"""Why a prefill replica could not help, in one word: for routers, logs, and the choice of what to do next."""

from kvrelay.errors import (
    DeadlineExceeded,
    Draining,
    KvrelayError,
    Mismatch,
    PeerLost,
    ResourceExhausted,
    StaleIncarnation,
    Unavailable,
)

UNREACHABLE = "unreachable"
TIMEOUT = "timeout"

PREFIX_LOST = ("evicted", "gap")
"""Reasons of the engine that mean: the prefix it held for the job had to give way to others."""

_WORDS: tuple[tuple[type[KvrelayError], str], ...] = (
    (Mismatch, "mismatch"),
    (StaleIncarnation, "restarted"),
    (Draining, "draining"),
    (PeerLost, UNREACHABLE),
    (Unavailable, "unavailable"),
    (ResourceExhausted, "busy"),
    (DeadlineExceeded, TIMEOUT),
)


class LegFailedError(Exception):
    """A leg came to nothing; `reason` is one word for the router."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def reason_of(error: KvrelayError) -> str:
    """Return one word for why a peer could not help."""
    return next((word for kind, word in _WORDS if isinstance(error, kind)), "error")
