"""Loading a prefix from another replica in the simulation: what `kvrelay.replica.prefix_pull` does, without gRPC."""

from collections.abc import Callable

from kvrelay.engine.protocol import (
    AttachLease,
    ConfirmLease,
    LeaseGrant,
    LeasePrefix,
    LeaseReply,
    Pulled,
    PullFailed,
    ReadLocally,
    ReleaseLeases,
    Verdict,
)
from ops.chaos.calm import BLOCK_TOKENS
from ops.chaos.host import Host
from ops.chaos.world import World

PATIENCE_S = 1.0
"""After this long the job computes instead."""
LEASE_TTL_S = (0.05, 2.0)
"""From leases that end in the midst of the pull to those that outlive it."""


class PrefixLoad:
    """Brings a waiting job the prefix that a holder has.

    Args:
        world: the fleet.
        host: where the job waits.
        holder: who may have the prefix.
        job_id: the job.
        block_keys: of its prompt.
        held_tokens: what is held at `host` already.
        on_over: told with one word how it went.
    """

    def __init__(
        self,
        world: World,
        host: Host,
        holder: Host,
        *,
        job_id: str,
        block_keys: bytes,
        held_tokens: int,
        on_over: Callable[[str], None],
    ) -> None:
        self._world = world
        self._host = host
        self._home = host.incarnation
        self._holder = holder
        self._holder_incarnation = holder.incarnation
        self._agent = holder.agent
        self._job_id = job_id
        self._on_over = on_over
        self._lease: LeaseGrant | None = None
        self._over = False
        ttl_s = world.rng.uniform(*LEASE_TTL_S)
        self._call(
            lambda call_id: LeasePrefix(
                call_id=call_id, block_keys=block_keys, skip_blocks=held_tokens // BLOCK_TOKENS, ttl_s=ttl_s
            ),
            self._leased,
        )
        world.on(host, self._home, PATIENCE_S, lambda: self._end("prefix timeout"))

    def on_engine(self, event: Pulled | PullFailed) -> None:
        """Take what the engine tells about the lease."""
        if self._over or self._lease is None or event.lease_id != self._lease.lease_id:
            return
        if isinstance(event, PullFailed):
            self._end(f"prefix {event.reason}")
            return
        self._call(
            lambda call_id: ConfirmLease(call_id=call_id, lease_id=event.lease_id, pages=event.pages), self._judged
        )

    def close(self) -> None:
        """The job has ended: give the lease back."""
        if not self._over:
            self._over = True
            self._release()

    def _call(
        self, command: Callable[[int], LeasePrefix | ConfirmLease], done: Callable[[LeaseReply | None], None]
    ) -> None:
        self._world.call(self._host, self._holder, self._holder_incarnation, command, done)

    def _leased(self, reply: LeaseReply | None) -> None:
        if reply is None or reply.lease is None:
            self._end("prefix refused")
            return
        self._lease = reply.lease
        if self._over:
            self._release()
            return
        self._host.handle(AttachLease(job_id=self._job_id, lease=reply.lease, source=self._agent))

    def _judged(self, reply: LeaseReply | None) -> None:
        if self._over or self._lease is None:
            return
        if reply is None or not reply.valid:
            self._end("prefix unconfirmed" if reply is None else "prefix declined")
            return
        self._over = True
        self._host.handle(Verdict(job_id=self._job_id, lease_id=self._lease.lease_id, valid=True))
        self._on_over("prefix loaded")

    def _end(self, how: str) -> None:
        """Give up: have the job compute."""
        if self._over:
            return
        self._over = True
        self._release()
        self._host.handle(ReadLocally(job_id=self._job_id))
        self._on_over(how)

    def _release(self) -> None:
        if self._lease is None:
            return
        release = ReleaseLeases(lease_ids=(self._lease.lease_id,))
        self._world.on(
            self._holder, self._holder_incarnation, self._world.delay_s(), lambda: self._holder.handle(release)
        )
