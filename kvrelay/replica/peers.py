"""What a replica knows of the replicas it pulls from."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from kvrelay.engine.protocol import AgentInfo, LeasedPage, LeaseGrant
from kvrelay.errors import KvrelayError, ResourceExhausted, Unavailable
from kvrelay.rpc.channel import Channels
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.replica_client import KvSourceClient, PrefillClient
from kvrelay.types import ModelIdentity, Peer

UNCONFIRMED = "unconfirmed"
"""The owner gave no verdict in time."""

HANDSHAKE_TIMEOUT_S = 5.0
"""Longest wait for a handshake: two connection attempts and an answer between two engine steps."""

CONFIRM_TIMEOUT_S = 5.0
"""Longest wait for a verdict over all tries. Without an answer the pull counts as invalid."""

CONFIRM_TRIES_MAX = 4
CONFIRM_PAUSE_S = 0.1
"""First pause between tries, doubled each time: long enough to reconnect, short enough not to stall an answer."""

RELEASE_TIMEOUT_S = 2.0
"""Longest wait for a release. A lease that could not be released expires."""

RELEASES_MAX = 1024
"""Releases under way; past it leases are left to expire."""

AGENTS_MAX = 1024
"""Handshakes kept; more than a fleet has replicas."""


class Peers:
    """Handshakes, kept until a peer's incarnation changes, and calls about leases."""

    def __init__(
        self, channels: Channels, *, me: Callable[[], Peer], agent: AgentInfo, identity: ModelIdentity
    ) -> None:
        """`me` is asked at each call: the address is known once the server listens."""
        self._channels = channels
        self._me = me
        self._layout = agent.layout
        self._identity = identity
        self._agents: OrderedDict[str, tuple[Peer, AgentInfo]] = OrderedDict()
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def me(self) -> Peer:
        """This replica."""
        return self._me()

    def prefill(self, peer: Peer) -> PrefillClient:
        """Return the client of a prefill replica."""
        return PrefillClient(self._channels.get(peer.address))

    def source(self, peer: Peer) -> KvSourceClient:
        """Return the client of a lease's owner."""
        return KvSourceClient(self._channels.get(peer.address))

    async def agent(self, peer: Peer, deadline: Deadline) -> AgentInfo:
        """Return what is needed to pull from a peer; asks once an incarnation.

        Raises:
            KvrelayError: the peer cannot be reached, was restarted, or does not fit.
        """
        known = self._agents.get(peer.replica_id)
        if known is not None and known[0] == peer:
            self._agents.move_to_end(peer.replica_id)
            return known[1]
        agent = await self.source(peer).handshake(
            puller=self.me,
            layout=self._layout,
            identity=self._identity,
            owner_incarnation=peer.incarnation,
            timeout_s=deadline.sooner(HANDSHAKE_TIMEOUT_S).left_s(),
        )
        await self._keep(peer, agent)
        return agent

    def knows(self, peer: Peer) -> bool:
        """Tell whether there was a handshake with this very start of a peer."""
        known = self._agents.get(peer.replica_id)
        return known is not None and known[0] == peer

    async def lease_prefix(
        self, peer: Peer, block_keys: bytes, *, skip_blocks: int, ttl_s: float, deadline: Deadline
    ) -> LeaseGrant:
        """Lease what a peer holds of a prefix past its first `skip_blocks`; granted or refused at once.

        Raises:
            KvrelayError: refused, or the peer cannot be reached.
        """
        return await self.source(peer).lease_prefix(
            puller=self.me,
            owner_incarnation=peer.incarnation,
            block_keys=block_keys,
            skip_blocks=skip_blocks,
            ttl_s=ttl_s,
            timeout_s=deadline.left_s(),
        )

    async def lost(self, peer: Peer) -> None:
        """Forget the connection to a peer that could not be reached: the next try starts without backoff."""
        await self._channels.drop(peer.address)

    async def confirm(
        self, peer: Peer, lease_id: str, pages: tuple[LeasedPage, ...], deadline: Deadline
    ) -> tuple[bool, str]:
        """Return the owner's verdict on a pull and, when it is not valid, one word why; no answer is "unconfirmed"."""
        deadline = deadline.sooner(CONFIRM_TIMEOUT_S)
        pause_s = CONFIRM_PAUSE_S
        for _ in range(CONFIRM_TRIES_MAX):
            try:
                return await self.source(peer).confirm(
                    owner_incarnation=peer.incarnation, lease_id=lease_id, pages=pages, timeout_s=deadline.left_s()
                )
            except (Unavailable, ResourceExhausted):
                await asyncio.sleep(min(pause_s, deadline.left_s()))
                pause_s *= 2
            except KvrelayError:
                break
        return False, UNCONFIRMED

    def release(self, peer: Peer, lease_id: str) -> None:
        """End a lease that will not be pulled, in the background; safe while the caller is being cancelled."""
        if len(self._releases) < RELEASES_MAX:
            task = asyncio.get_running_loop().create_task(self._release(peer, lease_id))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def settle(self) -> None:
        """Wait for the releases under way; they are bounded in time."""
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def _release(self, peer: Peer, lease_id: str) -> None:
        try:
            await self.source(peer).release(
                owner_incarnation=peer.incarnation, lease_ids=[lease_id], timeout_s=RELEASE_TIMEOUT_S
            )
        except KvrelayError:
            return  # it expires

    async def _keep(self, peer: Peer, agent: AgentInfo) -> None:
        before = self._agents.pop(peer.replica_id, None)
        if before is not None and before[0].address != peer.address:
            await self._channels.drop(before[0].address)  # it has moved
        self._agents[peer.replica_id] = (peer, agent)
        if len(self._agents) > AGENTS_MAX:
            self._agents.popitem(last=False)
