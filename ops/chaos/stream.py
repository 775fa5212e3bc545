"""What a prefill replica does for one leg in the simulation: `prefill_svc`, without gRPC."""

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.protocol import (
    Cancel,
    Event,
    Failed,
    Granted,
    Held,
    Prefill,
    Prompt,
    Pulled,
    PullFailed,
    ReleaseLeases,
)
from kvrelay.errors import KvrelayError, PeerLost, StaleIncarnation
from kvrelay.types import Sampling
from ops.chaos.host import Host
from ops.chaos.prefix import PrefixLoad
from ops.chaos.world import World


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a leg asks of a prefill replica; with `prefix_tokens`, some other one may hold that much of the prompt."""

    job_id: str
    prompt: Prompt
    sampling: Sampling
    held_tokens: int
    forced_next: int | None
    priority: int
    deadline_at_s: float
    lease_ttl_s: float
    prefix_tokens: int


class Stream:
    """The call of one leg, as the prefill replica sees it: events go to the leg in order until either end is lost."""

    def __init__(self, world: World, owner: Host, ask: Ask, to_leg: Callable[[Event], None]) -> None:
        self._world = world
        self._owner = owner
        self._incarnation = owner.incarnation
        self._ask = ask
        self._to_leg = to_leg
        self._lease_id = ""
        self._last_s = 0.0
        self._load: PrefixLoad | None = None
        self.loads: list[str] = []
        world.on(owner, self._incarnation, world.delay_s(), self._accept, lost=self._refuse)

    def cancel(self) -> None:
        """The caller has gone: end the job and free its lease, once that is noticed."""
        self._world.on(self._owner, self._incarnation, self._world.delay_s(), self._drop)

    def lose(self, error: KvrelayError) -> None:
        """The connection is lost: both ends notice."""
        self._send(Failed(job_id=self._ask.job_id, error=error))
        self.cancel()

    def revoke(self) -> None:
        """The owner takes the lease back; the leg learns of it when it asks."""
        if self._lease_id and self._owner.running and self._owner.incarnation == self._incarnation:
            self._owner.handle(ReleaseLeases(lease_ids=(self._lease_id,)))

    def _accept(self) -> None:
        ask = self._ask
        self._owner.routes[ask.job_id] = self._take
        self._owner.handle(
            Prefill(
                job_id=ask.job_id,
                prompt=ask.prompt,
                sampling=ask.sampling,
                held_tokens=ask.held_tokens,
                prefix_tokens=ask.prefix_tokens,
                forced_next=ask.forced_next,
                priority=ask.priority,
                deadline_at_s=ask.deadline_at_s,
                lease_ttl_s=ask.lease_ttl_s,
            )
        )

    def _refuse(self) -> None:
        error = StaleIncarnation("it was restarted") if self._owner.alive else PeerLost("nobody listens")
        self._send(Failed(job_id=self._ask.job_id, error=error))

    def _take(self, event: Event) -> None:
        match event:
            case Held():
                self._load = self._load_prefix(event)
                return
            case Pulled() | PullFailed():
                if self._load is not None:
                    self._load.on_engine(event)
                return
            case Granted():
                self._lease_id = event.lease.lease_id
        self._send(event)

    def _load_prefix(self, held: Held) -> PrefixLoad:
        return PrefixLoad(
            self._world,
            self._owner,
            self._world.holder(self._owner, self._ask.prompt.block_keys),
            job_id=self._ask.job_id,
            block_keys=self._ask.prompt.block_keys,
            held_tokens=held.tokens,
            on_over=self.loads.append,
        )

    def _send(self, event: Event) -> None:
        self._last_s = max(self._last_s, self._world.now_s + self._world.delay_s())
        self._world.after(self._last_s - self._world.now_s, lambda: self._to_leg(event))

    def _drop(self) -> None:
        self._owner.routes.pop(self._ask.job_id, None)
        if self._load is not None:
            self._load.close()
        self._owner.handle(Cancel(job_id=self._ask.job_id))
        if self._lease_id:
            self._owner.handle(ReleaseLeases(lease_ids=(self._lease_id,)))
