"""One request in the simulation: its attempts, what its client was told, and whether that is right."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.protocol import (
    Cancel,
    Ended,
    Event,
    Failed,
    FirstToken,
    Generate,
    Held,
    Pulled,
    PullFailed,
    ReadLocally,
    Tokens,
)
from kvrelay.errors import InternalError, InvalidArgument, KvrelayError, PeerLost
from kvrelay.types import Sampling
from ops.chaos.calm import prompt_of
from ops.chaos.host import Host
from ops.chaos.leg import Leg
from ops.chaos.prefix import PrefixLoad
from ops.chaos.stream import Ask
from ops.chaos.world import World

ATTEMPTS_MAX = 4
RETRY_PAUSE_S = 0.1


class WrongError(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a client asks for, and what the fault-free fleet answers.

    Attributes:
        decoders: hosts that may write the answer, in order of preference.
        prefillers: how many of the other hosts may read the prompt before it is read where the answer is written.
        never_local: it may not be read there.
        prefix_tokens: how much of the prompt whoever reads it may look for at another host.
        deadline_at_s: when the client wants it to be over.
    """

    name: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    expected: tuple[int, ...]
    decoders: tuple[str, ...]
    prefillers: int
    never_local: bool
    prefix_tokens: int
    priority: int
    lease_ttl_s: float
    deadline_at_s: float


class Request:
    """What a router does for a request: attempts until one answers, or the deadline.

    Attributes:
        told: tokens that the client has.
        ended: how it ended: "answered", "cancelled", or the name of the error; empty while it runs.
        legs: how each leg of each attempt ended.
    """

    def __init__(self, world: World, order: Order) -> None:
        self.order = order
        self.told: list[int] = []
        self.ended = ""
        self.legs: list[str] = []
        self.world = world
        self._attempts = 0
        self._attempt: Attempt | None = None
        world.after(order.deadline_at_s - world.now_s, lambda: self.end("DeadlineExceeded"))
        self._next_attempt()

    def take(self, attempt: "Attempt", position: int, ids: Sequence[int]) -> None:
        """Pass tokens on to the client, each once; `position` is absolute."""
        if self.ended or attempt is not self._attempt:
            return
        start = position - len(self.order.prompt_ids)
        if start > len(self.told):
            raise WrongError(f"{self.order.name}: a gap before token {start}")
        self.told += ids[len(self.told) - start :]
        if tuple(self.told) != self.order.expected[: len(self.told)]:
            raise WrongError(f"{self.order.name}: told {self.told}, expected {self.order.expected}")

    def answered(self, attempt: "Attempt") -> None:
        """End it well: the answer is whole."""
        if self.ended or attempt is not self._attempt:
            return
        if tuple(self.told) != self.order.expected:
            raise WrongError(f"{self.order.name}: ended after {self.told}, expected {self.order.expected}")
        self.end("answered")

    def failed(self, attempt: "Attempt", error: KvrelayError) -> None:
        """Try again elsewhere, if that may help."""
        if isinstance(error, InternalError | InvalidArgument):
            raise WrongError(f"{self.order.name}: {error}")
        if self.ended or attempt is not self._attempt:
            return
        if error.retryable:
            self._retry(attempt)
        else:
            self.end(type(error).__name__)

    def lost(self, attempt: "Attempt") -> None:
        """The host of an attempt died or does not answer."""
        if not self.ended and attempt is self._attempt:
            self._retry(attempt)

    def host_killed(self, host: Host) -> None:
        """Notice that a host died: its own connections break at once."""
        attempt = self._attempt
        if attempt is None:
            return
        if attempt.host is host:
            attempt.dead()
            self.world.after(self.world.delay_s(), lambda: self.lost(attempt))
        elif (leg := attempt.leg) is not None and leg.owner is host:
            leg.stream.lose(PeerLost("the connection was reset"))

    def host_stalls(self, host: Host) -> None:
        """Notice that a host has not answered for long."""
        if self._attempt is not None and self._attempt.host is host:
            self.lost(self._attempt)

    def connection_breaks(self) -> None:
        """Lose the connection to the prefill replica, though both ends live."""
        if self._attempt is not None and self._attempt.leg is not None:
            self._attempt.leg.stream.lose(PeerLost("the connection was reset"))

    def lease_ends(self) -> None:
        """Have the owner end the lease that is pulled."""
        if self._attempt is not None and self._attempt.leg is not None:
            self._attempt.leg.stream.revoke()

    def end(self, how: str) -> None:
        """End the request, whatever it is doing."""
        if not self.ended:
            self.ended = how
            if self._attempt is not None:
                self._attempt.cancel()

    def _retry(self, attempt: "Attempt") -> None:
        attempt.cancel()
        self._attempt = None
        self.world.after(RETRY_PAUSE_S, self._next_attempt)

    def _next_attempt(self) -> None:
        if self.ended:
            return
        if self._attempts == ATTEMPTS_MAX:
            self.end("Unavailable")
            return
        self._attempts += 1
        # A router does not know that a host is stopped before it misses heartbeats.
        alive = [host for name in self.order.decoders if (host := self.world.hosts[name]).alive]
        if alive:
            self._attempt = Attempt(self.world, self, alive[(self._attempts - 1) % len(alive)], self._attempts)
        else:
            self.world.after(RETRY_PAUSE_S, self._next_attempt)


class Attempt:
    """One try at one host: what the decode service does."""

    def __init__(self, world: World, request: Request, host: Host, number: int) -> None:
        self._world = world
        self._request = request
        self.host = host
        self.home = host.incarnation
        self.job_id = f"{request.order.name}.{number}"
        self._order = request.order
        self._output = tuple(request.told)
        self._first: int | None = None
        self.leg: Leg | None = None
        self._load: PrefixLoad | None = None
        self._held_tokens = 0
        self._over = False
        others = [other for other in world.hosts.values() if other is not host and other.alive]
        world.rng.shuffle(others)
        self._targets = others[: self._order.prefillers]
        world.on(host, self.home, world.delay_s(), self._start)

    def cancel(self) -> None:
        """Stop it, once the host hears of it."""
        self._world.on(self.host, self.home, self._world.delay_s(), self._cancelled)

    def dead(self) -> None:
        """The host was killed: the prefill replica notices that its caller has gone."""
        self._over = True
        if self.leg is not None:
            self.leg.close()
        if self._load is not None:
            self._load.close()

    def _start(self) -> None:
        if self._over:
            return
        self.host.routes[self.job_id] = self._take
        self.host.handle(
            Generate(
                job_id=self.job_id,
                prompt=prompt_of(self._order.prompt_ids, self._output),
                sampling=self._order.sampling,
                remote=bool(self._targets),
                prefix_tokens=0 if self._targets else self._order.prefix_tokens,
                priority=self._order.priority,
                deadline_at_s=self._order.deadline_at_s,
            )
        )

    def _take(self, event: Event) -> None:
        if self._over:
            return
        match event:
            case Held():
                self._held_tokens = event.tokens
                if event.prefix_s is not None:
                    self._load = self._load_prefix()
                if self._targets:
                    # As in the service, where the engine's next word may already lie in the channel.
                    self._world.on(self.host, self.home, 0.0, self._next_leg)
            case Tokens():
                self._request.take(self, event.position, event.ids)
            case Pulled() | PullFailed():
                puller = self.leg or self._load
                if puller is not None:
                    puller.on_engine(event)
            case Ended():
                self._close()
                self._request.answered(self)
            case Failed():
                self._close()
                self._request.failed(self, event.error)

    def _next_leg(self) -> None:
        if self._over:
            return
        if not self._targets:
            self.leg = None
            if self._order.never_local:
                self._request.end("Unavailable")
            else:
                self.host.handle(ReadLocally(job_id=self.job_id))
            return
        owner = self._targets.pop(0)
        ask = Ask(
            job_id=f"{self.job_id}.{owner.name}",
            prompt=prompt_of(self._order.prompt_ids, self._output),
            sampling=self._order.sampling,
            held_tokens=self._held_tokens,
            forced_next=self._first,
            priority=self._order.priority,
            deadline_at_s=self._order.deadline_at_s,
            lease_ttl_s=self._order.lease_ttl_s,
            prefix_tokens=self._order.prefix_tokens,
        )
        self.leg = Leg(
            self._world,
            self.host,
            owner,
            ask,
            job_id=self.job_id,
            on_first=self._on_first,
            on_over=self._on_leg_over,
        )

    def _on_first(self, event: FirstToken) -> None:
        if self._first is None:
            self._first = event.token
            self._request.take(self, event.position, (event.token,))
        if event.finish_reason is not None:
            self._close()
            self._drop()
            self._request.answered(self)

    def _load_prefix(self) -> PrefixLoad:
        block_keys = prompt_of(self._order.prompt_ids, self._output).block_keys
        return PrefixLoad(
            self._world,
            self.host,
            self._world.holder(self.host, block_keys),
            job_id=self.job_id,
            block_keys=block_keys,
            held_tokens=self._held_tokens,
            on_over=self._request.legs.append,
        )

    def _on_leg_over(self, reason: str) -> None:
        self._request.legs.append(reason or "pulled")
        if self.leg is not None:
            self._request.legs += self.leg.stream.loads
        if not reason:
            return
        if reason in ("evicted", "gap"):
            self._held_tokens = 0
        self._next_leg()

    def _cancelled(self) -> None:
        self._close()
        self._drop()

    def _close(self) -> None:
        self._over = True
        if self.leg is not None:
            self.leg.close()
        if self._load is not None:
            self._load.close()

    def _drop(self) -> None:
        self.host.routes.pop(self.job_id, None)
        self.host.handle(Cancel(job_id=self.job_id))
