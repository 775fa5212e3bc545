"""One `kvrelay up`, from its first child to the end of the last."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.client import AsyncClient
from kvrelay.config import UpConfig
from kvrelay.errors import FailedPrecondition, KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.up.fleet import PROBE_INTERVAL_S, Fleet, Screen
from kvrelay.up.plan import ChildSpec, Kind, Plan
from kvrelay.up.policy import RestartPolicy
from kvrelay.up.ports import is_free
from kvrelay.up.probes import Probe, is_ready
from kvrelay.up.processes import start_ticks
from kvrelay.up.signals import StopSignals
from kvrelay.up.state import ChildRecord, FleetRecord, StateFile

EXIT_UNCLEAN = 1
EXIT_INTERRUPTED = 130
"""As shells have it for Ctrl-C: the operator did not want to wait for the drain."""

CANCEL_TIMEOUT_S = 5.0
"""What the session leaves behind (open streams) is closed at once, or ends with the fleet."""

Session = Callable[[], Awaitable[int]]
"""What to do while the fleet is up; ends it by returning an exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to run.

    Attributes:
        config: the operator's wishes.
        children: the processes.
        router, registry, redis_url: for the state file.
        drain_timeout_s: the children's own bound on draining.
        probe: whether a child is ready.
    """

    config: UpConfig
    children: Sequence[ChildSpec]
    router: str = ""
    registry: str = ""
    redis_url: str = ""
    drain_timeout_s: float
    probe: Probe = is_ready


async def run_fleet(what: Run, screen: Screen, session: Session) -> int:
    """Run a fleet until its session ends, a signal comes, or it fails; return the exit code.

    The first SIGINT or SIGTERM drains, the second kills.

    Raises:
        Unavailable: it could not start or go on.
        FailedPrecondition: another fleet runs in this state directory, or a port is taken.
    """
    state = StateFile(Path(what.config.state_dir))
    state.claim()
    _check_ports(what.children)
    record = FleetRecord(
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()),
        router=what.router,
        registry=what.registry,
        redis_url=what.redis_url,
    )

    def write_state(children: tuple[ChildRecord, ...]) -> None:
        state.write(replace(record, children=children))

    fleet = Fleet(
        what.children,
        policy=RestartPolicy(what.config.on_exit, time.monotonic),
        probe=what.probe,
        screen=screen,
        drain_timeout_s=what.drain_timeout_s,
        on_change=write_state,
    )
    try:
        with StopSignals(fleet.kill, screen) as signals:
            return await _live(fleet, what.config.start_timeout_s, signals, session, screen)
    finally:
        state.remove()


async def _live(fleet: Fleet, start_timeout_s: float, signals: StopSignals, session: Session, screen: Screen) -> int:
    async def work() -> int:
        await fleet.start(start_timeout_s)
        return await fleet.unless_failed(session())

    working = asyncio.create_task(work())
    stopped = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        code = working.result() if working.done() else 0
    finally:
        stopped.cancel()
        working.cancel()
        await asyncio.wait({working}, timeout=CANCEL_TIMEOUT_S)
        unclean = await fleet.drain()
    if signals.count > 1:
        return EXIT_INTERRUPTED
    if unclean:
        screen.say(f"did not end well: {', '.join(unclean)}")
    return code or (EXIT_UNCLEAN if unclean else 0)


async def wait_known(plan: Plan, timeout_s: float) -> None:
    """Wait until the router has every replica in its view: from then on requests find them all.

    Raises:
        Unavailable: it took too long.
    """
    wanted = {spec.name for spec in plan.replicas}
    deadline = Deadline.after(timeout_s)
    async with AsyncClient(plan.router.address) as client:
        while missing := wanted - await _ready_ids(client):
            if deadline.expired:
                raise Unavailable(f"the router does not know {', '.join(sorted(missing))}; see its log")
            await asyncio.sleep(PROBE_INTERVAL_S)


async def _ready_ids(client: AsyncClient) -> set[str]:
    try:
        status = await client.status()
    except KvrelayError:
        return set()
    return {replica.peer.replica_id for replica in status.replicas if replica.state == "ready"}


def _check_ports(children: Sequence[ChildSpec]) -> None:
    for spec in children:
        if spec.kind is Kind.STORE or not spec.address:
            continue
        host, _, port = spec.address.rpartition(":")
        if not is_free(host.strip("[]"), int(port)):
            raise FailedPrecondition(
                f"{spec.address} is taken, and {spec.name} needs it; stop what listens there, or give --ports free"
            )
