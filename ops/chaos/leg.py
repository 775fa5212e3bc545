"""One try at one prefill replica in the simulation: what `decode_svc` does about it, without gRPC."""

from collections.abc import Callable

from kvrelay.engine.protocol import (
    AttachLease,
    ConfirmLease,
    Event,
    ExtendLeases,
    Failed,
    FirstToken,
    FirstTokenKnown,
    Granted,
    LeaseReply,
    PiecesFinal,
    PiecesReady,
    Pulled,
    PullFailed,
    Verdict,
)
from kvrelay.errors import InvalidArgument, PeerLost
from ops.chaos.host import Host
from ops.chaos.stream import Ask, Stream
from ops.chaos.world import KEEPALIVE_S, World

CONFIRM_TRIES_MAX = 4
CONFIRM_PAUSE_S = 0.1
DUPLICATED_SHARE = 0.2
"""Share of announcements of final pages that reach the engine twice, or after later ones."""


class Leg:
    """Pulls the prompt of one job from one owner.

    Args:
        world: the fleet.
        host: where the job is.
        owner: whom to ask.
        ask: what for.
        job_id: the job at `host`.
        on_first: told the first token; returns False when it ended the answer.
        on_over: told once whether the KV is here; else with the reason, one word.
    """

    def __init__(
        self,
        world: World,
        host: Host,
        owner: Host,
        ask: Ask,
        *,
        job_id: str,
        on_first: Callable[[FirstToken], None],
        on_over: Callable[[str], None],
    ) -> None:
        self._world = world
        self._host = host
        self._home = host.incarnation
        self.owner = owner
        self._owner_incarnation = owner.incarnation
        self._agent = owner.agent
        self._ask = ask
        self._job_id = job_id
        self._on_first = on_first
        self._on_over = on_over
        self._lease_id = ""
        self._confirmed = self._first = self.closed = False
        self.stream = Stream(world, owner, ask, self._arrive)
        world.after(KEEPALIVE_S, self._check_peer)

    def close(self) -> None:
        """Cancel the call; give the engine's room and the lease back unless the KV is here."""
        if self.closed:
            return
        self.closed = True
        self.stream.cancel()
        done = self._confirmed and self._first
        if self._lease_id and not done and self._host.alive and self._host.incarnation == self._home:
            self._host.handle(Verdict(job_id=self._job_id, lease_id=self._lease_id, valid=False))

    def on_engine(self, event: Pulled | PullFailed) -> None:
        """Take what the engine tells about a lease."""
        if self.closed or event.lease_id != self._lease_id:
            return
        if isinstance(event, PullFailed):
            self._over(event.reason)
        else:
            self._confirm(event, CONFIRM_TRIES_MAX)

    # ------------------------------------------------------------ what the prefill replica tells

    def _arrive(self, event: Event) -> None:
        self._world.on(self._host, self._home, 0.0, lambda: self._take(event))

    def _take(self, event: Event) -> None:
        if self.closed:
            return
        match event:
            case Granted():
                self._granted(event)
            case PiecesFinal():
                self._pieces(event)
            case FirstToken():
                self._first = True
                self._on_first(event)
                if event.finish_reason is None and not self.closed:
                    known = FirstTokenKnown(job_id=self._job_id, token=event.token)
                    self._host.handle(known)
                    self._over_if_done()
            case Failed():
                assert not isinstance(event.error, InvalidArgument), event.error
                self._over(type(event.error).__name__)

    def _granted(self, event: Granted) -> None:
        self._lease_id = event.lease.lease_id
        self._host.handle(
            AttachLease(
                job_id=self._job_id,
                lease=event.lease,
                source=self._agent,
                prefill_cached_tokens=event.cached_tokens,
            )
        )
        self._extend()

    def _pieces(self, event: PiecesFinal) -> None:
        ready = PiecesReady(job_id=self._job_id, lease_id=self._lease_id, pages=event.pages, all=event.all)
        if self._world.rng.random() < DUPLICATED_SHARE:
            self._world.on(self._host, self._home, self._world.delay_s(), lambda: self._host.handle(ready))
            if self._world.rng.random() < 0.5:
                return
        self._host.handle(ready)

    # ------------------------------------------------------------ calls to the owner

    def _extend(self) -> None:
        """Extend the lease while it is waited for."""
        if self.closed:
            return

        def answered(reply: LeaseReply | None) -> None:
            if reply is not None and self._lease_id in reply.ended and not self.closed:
                self._over("expired")

        self._world.call(
            self._host,
            self.owner,
            self._owner_incarnation,
            lambda call_id: ExtendLeases(call_id=call_id, lease_ids=(self._lease_id,), ttl_s=self._ask.lease_ttl_s),
            answered,
        )
        self._world.on(self._host, self._home, self._ask.lease_ttl_s / 3, self._extend)

    def _confirm(self, pulled: Pulled, tries: int) -> None:
        if self.closed:
            return

        def answered(reply: LeaseReply | None) -> None:
            if self.closed:
                return
            if reply is None and tries > 1:
                self._world.on(self._host, self._home, CONFIRM_PAUSE_S, lambda: self._confirm(pulled, tries - 1))
            else:
                self._judge(reply)

        self._world.call(
            self._host,
            self.owner,
            self._owner_incarnation,
            lambda call_id: ConfirmLease(call_id=call_id, lease_id=pulled.lease_id, pages=pulled.pages),
            answered,
        )

    def _judge(self, reply: LeaseReply | None) -> None:
        if reply is None or not reply.valid:
            self._over("unconfirmed" if reply is None else "declined")
            return
        self._confirmed = True
        verdict = Verdict(job_id=self._job_id, lease_id=self._lease_id, valid=True)
        self._host.handle(verdict)
        if self._world.rng.random() < DUPLICATED_SHARE:
            self._host.handle(verdict)
        self._over_if_done()

    def _check_peer(self) -> None:
        """Lose the connection to an owner, or of a puller, that does not answer keepalives."""
        if self.closed:
            return
        if self.owner.stopped or self._host.stopped or not self.owner.alive or not self._host.alive:
            self.stream.lose(PeerLost("no answer to keepalives"))
        else:
            self._world.after(KEEPALIVE_S, self._check_peer)

    # ------------------------------------------------------------ ends

    def _over_if_done(self) -> None:
        if self._first and self._confirmed:
            self._over("")

    def _over(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_over(reason)
