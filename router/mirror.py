"""The mirror through reloads and losses: the old view serves until the new one has caught up. Pure."""

from kvrelay.config import LIVENESS_TTL_S
from kvrelay.directory import CaughtUp, ReplicaGone, Reset, Watched
from router.view import FleetView


class Mirror:
    """The view in use, and the one that is being loaded.

    Attributes:
        view: the view in use.
        position: where to resume the watch; empty: from a snapshot.
    """

    def __init__(self) -> None:
        self.view = FleetView()
        self.position = ""
        self._next: FleetView | None = None

    @property
    def loading(self) -> bool:
        """True while a new view is being loaded."""
        return self._next is not None

    def take(self, watched: Watched, *, now_s: float) -> None:
        """Take in one event of the watch."""
        event = watched.event
        if isinstance(event, Reset):
            self._next = FleetView()
        loading = self._next
        (loading or self.view).apply(event, now_s=now_s)
        if loading and isinstance(event, ReplicaGone):
            self.view.apply(event, now_s=now_s)
        if loading and isinstance(event, CaughtUp):
            self._swap(loading, now_s)
        if not self._next:
            self.position = watched.position or self.position

    def broken(self) -> None:
        """The watch broke: drop what was half loaded."""
        self._next = None

    def _swap(self, loaded: FleetView, now_s: float) -> None:
        # A store that came back empty does not know its replicas yet. They are alive, and enter again within a few
        # heartbeats; those that do not are dropped when their time to live is over.
        for member in self.view.members():
            loaded.keep(member, until_s=now_s + LIVENESS_TTL_S)
        self.view = loaded
        self._next = None
