"""One replica of a simulated fleet: an engine core over the mock runner that is stopped, killed and started at will."""

from collections.abc import Callable

from kvrelay.config import EngineConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.mock import MockRunner
from kvrelay.engine.pool import PageState
from kvrelay.engine.protocol import AgentInfo, CallId, Command, Event, LeaseReply, Started
from kvrelay.engine.runner import KvMemory
from kvrelay.kv.faults import FaultyTransfer, Plan
from kvrelay.kv.memory import MemoryNetwork, MemoryTransfer
from kvrelay.types import split_keys

Action = Callable[[], None]


class SmallRunner(MockRunner):
    """The mock model over a pool of so few pages that every job feels the others."""

    def __init__(self, config: EngineConfig, pages: int) -> None:
        super().__init__(config, sleep=lambda _: None)
        self._pages = pages

    def allocate(self, pages: int) -> KvMemory:  # noqa: ARG002 - the configured size has no unit small enough
        """Allocate the pool."""
        return super().allocate(self._pages)


class Host:
    """A process that can be stopped and killed, and the front's side of its engine.

    Args:
        name: stable name.
        config: of the engine.
        pages: size of its pool.
        clock: monotonic seconds.
        network: what it reads over.
        plan: what happens to the reads of its n-th start.

    Attributes:
        routes: who takes the events of a job.
        calls: who takes the reply to a call about leases.
        inbox: what arrived while it was stopped.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        pages: int,
        clock: Callable[[], float],
        network: MemoryNetwork,
        plan: Callable[[int], Plan],
    ) -> None:
        self.name = name
        self.starts = 0
        self.alive = False
        self._config = config
        self._pages = pages
        self._clock = clock
        self._network = network
        self._plan = plan
        self.boot()

    def boot(self) -> None:
        """Start as a new incarnation that knows nothing."""
        self.starts += 1
        self.alive, self.stopped = True, False
        self.inbox: list[Action] = []
        self.routes: dict[str, Callable[[Event], None]] = {}
        self.calls: dict[CallId, Callable[[LeaseReply], None]] = {}
        self._events: list[Event] = []
        self.transfer = FaultyTransfer(MemoryTransfer(self._network, self.incarnation), self._plan(self.starts))
        self.core = EngineCore(
            self._config,
            SmallRunner(self._config, self._pages),
            self.transfer,
            replica_id=self.name,
            incarnation=self.incarnation,
            clock=self._clock,
            emit=self._events.append,
        )
        started = self._events.pop(0)
        assert isinstance(started, Started)
        self.agent: AgentInfo = started.agent

    @property
    def incarnation(self) -> str:
        """Name of this start; also that of its transfer agent."""
        return f"{self.name}-{self.starts}"

    @property
    def running(self) -> bool:
        """True while it is neither dead nor stopped."""
        return self.alive and not self.stopped

    def kill(self) -> None:
        """End it as SIGKILL does: memory, reads and whatever it knew are gone."""
        self.alive = False
        self.core.close()

    def handle(self, command: Command) -> None:
        """Pass a command to the engine, and on what it tells at once."""
        self.core.handle(command)
        self._tell()

    def step(self) -> None:
        """Have the engine make one step, and pass on what it tells."""
        self.core.step()
        self._tell()

    def held_pages(self, block_keys: bytes) -> int:
        """Return how much of a prompt is cached here, in pages."""
        keys = split_keys(block_keys, name="block_keys")
        return len(self.core._parts.cache.match(keys, max_pages=len(keys)))  # noqa: SLF001 - the directory knows it

    def idle_faults(self) -> list[str]:
        """Return what an idle replica should not have: jobs, leases, pages that are not free or cached."""
        parts = self.core._parts  # noqa: SLF001 - what is checked is inside
        kept = {
            "jobs": len(parts.jobs),
            "leases": len(parts.stock),
            "reserved": parts.pool.reserved,
            "active": parts.pool.count(PageState.ACTIVE),
            "leased": parts.pool.count(PageState.LEASED),
            "quarantined": parts.pool.count(PageState.QUARANTINED),
        }
        return [f"{self.name} keeps {count} {what}" for what, count in kept.items() if count]

    def _tell(self) -> None:
        told, self._events[:] = list(self._events), []
        for event in told:
            if isinstance(event, LeaseReply):
                if (take := self.calls.pop(event.call_id, None)) is not None:
                    take(event)
            elif (route := self.routes.get(getattr(event, "job_id", ""))) is not None:
                route(event)
