"""Streams end at once when the replica behind them is known to be lost, without waiting for its connection to tell."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from kvrelay.types import Peer

Cut: TypeAlias = Callable[[str], None]


class Lifelines:
    """Who wants to know of the loss of which replica."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], dict[object, Cut]] = {}

    @contextmanager
    def hold(self, peer: Peer, cut: Cut) -> Iterator[None]:
        """Have `cut` called with the reason when this very start of the replica is lost, while inside."""
        name = (peer.replica_id, peer.incarnation)
        token = object()
        self._lines.setdefault(name, {})[token] = cut
        try:
            yield
        finally:
            lines = self._lines[name]
            del lines[token]
            if not lines:
                del self._lines[name]

    def cut(self, peer: Peer, reason: str) -> int:
        """Tell all who hold on to the replica; return how many did."""
        lines = list(self._lines.get((peer.replica_id, peer.incarnation), {}).values())
        for line in lines:
            line(reason)
        return len(lines)
