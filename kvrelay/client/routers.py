"""The routers a client may talk to, and which one it talks to now."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrelay.errors import InvalidArgument, Unavailable
from kvrelay.rpc.channel import Channels
from kvrelay.v1.router_pb2_grpc import RouterStub

if TYPE_CHECKING:
    from kvrelay.v1.router_pb2_grpc import RouterAsyncStub


class Routers:
    """Routers are equals: the client stays with one until that one is unavailable, then takes the next."""

    def __init__(self, addresses: str | Sequence[str]) -> None:
        """Take host:port addresses.

        Raises:
            InvalidArgument: no address, or an empty one.
        """
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._addresses or not all(self._addresses):
            raise InvalidArgument("address", "give the host:port of at least one router")
        self._current = 0
        self._channels = Channels()

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def current(self) -> str:
        """Address of the router in use."""
        return self._addresses[self._current]

    def stub(self) -> "RouterAsyncStub":
        """Return the router in use; only on the event loop that uses it."""
        return RouterStub(self._channels.get(self.current))

    def lost(self, error: Unavailable, address: str) -> Unavailable:
        """Take the next router, unless another call has already left this one; return the error with its address."""
        if address == self.current:
            self._current = (self._current + 1) % len(self._addresses)
        return type(error)(f"router {address}: {error.message}")

    async def close(self) -> None:
        """Close all connections."""
        await self._channels.close()
