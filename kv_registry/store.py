"""The fleet's state in Redis: one noun a module, put together here."""

from kv_registry.blocks import Blocks
from kv_registry.events import Events
from kv_registry.link import RedisLink
from kv_registry.members import Members
from kv_registry.reservations import Reservations
from kvrelay.types import Peer, Replica

FEEDS_MAX = 64
"""Models that one registry follows at once; each has a connection that waits for events."""


class Store:
    """Members, blocks, reservations and events of the fleet.

    Args:
        url: redis://, rediss:// or unix://.
    """

    def __init__(self, url: str) -> None:
        self.link = RedisLink(url)
        self._waiting_link = RedisLink(url, connections=FEEDS_MAX)
        self.members = Members(self.link)
        self.blocks = Blocks(self.link)
        self.reservations = Reservations(self.link)
        self.events = Events(self.link, self._waiting_link)

    async def register(self, replica: Replica, *, ttl_s: float) -> int:
        """Enter a replica and return its epoch; raises as `Members.register`."""
        model = replica.identity.model
        # The contract of members that are dead but not yet taken out must not hold.
        await self.sweep(model)
        registered = await self.members.register(replica, ttl_s=ttl_s)
        if registered.replaced:
            await self.reservations.drop_legs(model, replica.peer.replica_id, registered.replaced)
        return registered.epoch

    async def deregister(self, peer: Peer, *, model: str) -> None:
        """Take a replica out; its blocks, reservations and entry are gone when this returns."""
        await self.members.remove(model, peer.replica_id, peer.incarnation, reason="deregistered")
        await self.reservations.drop_legs(model, peer.replica_id, peer.incarnation)

    async def sweep(self, model: str) -> list[tuple[str, str]]:
        """Take out members whose life is over; return their (replica id, incarnation)."""
        members, over = await self.members.due(model)
        if members:
            await self.members.touch(model)
        removed = [each for each in over if await self.members.remove(model, *each, reason="expired")]
        for replica_id, incarnation in removed:
            await self.reservations.drop_legs(model, replica_id, incarnation)
        return removed

    async def close(self) -> None:
        """Close all connections."""
        await self.link.close()
        await self._waiting_link.close()
