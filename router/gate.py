"""Bounds how many requests a router serves at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvrelay.errors import InvalidArgument, ResourceExhausted

RETRY_AFTER_S: Final = 1.0
"""Hint to those turned away: about the time in which some of a full router's requests end."""


class Gate:
    """Lets `most` in at once, and each request id only once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: set[str] = set()

    def __len__(self) -> int:
        return len(self._inside)

    @contextmanager
    def enter(self, request_id: str) -> Iterator[None]:
        """Stay inside for the length of a request.

        Raises:
            InvalidArgument: a request of that id is inside already.
            ResourceExhausted: the router is full.
        """
        if request_id in self._inside:
            raise InvalidArgument("request_id", f"{request_id} is being served already; an id is used once")
        if len(self._inside) >= self._most:
            raise ResourceExhausted(
                f"this router serves {self._most} requests already; try again later or use another router",
                retry_after_s=RETRY_AFTER_S,
            )
        self._inside.add(request_id)
        try:
            yield
        finally:
            self._inside.discard(request_id)
