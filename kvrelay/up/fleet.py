"""Keeps the children of a fleet running: starts them in order, restarts those that die, ends them in order."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.up.child import Child, describe_exit
from kvrelay.up.lines import as_text
from kvrelay.up.plan import DRAIN_STAGES, START_STAGES, ChildSpec
from kvrelay.up.policy import CRASH_WINDOW_S, CRASHES_MAX, Action, RestartPolicy
from kvrelay.up.probes import Probe
from kvrelay.up.state import ChildRecord

PROBE_INTERVAL_S = 0.2
"""Between two questions whether a child is ready: short against the seconds that a start takes."""

DRAIN_MARGIN_S = 5.0
"""Beyond its own drain timeout a child needs time to stop; after that it is killed."""

KILL_TIMEOUT_S = 5.0
"""A killed process is gone at once, unless the kernel holds it."""

ENDED_WELL: Final = (0, -signal.SIGTERM)
"""How a child ends that is told to drain: by itself, or at once where it had not started enough to hear of it."""

T = TypeVar("T")


class Screen(Protocol):
    """Where a fleet tells what happens."""

    def say(self, line: str) -> None:
        """Tell the operator something."""

    def log(self, name: str, line: str) -> None:
        """Show a line that a child printed."""


class Fleet:
    """The children of one `kvrelay up`, supervised.

    Args:
        specs: the children.
        policy: what to do when one dies.
        probe: whether one is ready.
        screen: where to tell what happens.
        drain_timeout_s: the children's own bound on draining.
        on_change: called with what runs now, after each start of a child.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        policy: RestartPolicy,
        probe: Probe,
        screen: Screen,
        drain_timeout_s: float,
        on_change: Callable[[tuple[ChildRecord, ...]], None],
    ) -> None:
        self._specs = tuple(specs)
        self._policy = policy
        self._probe = probe
        self._screen = screen
        self._drain_timeout_s = drain_timeout_s
        self._on_change = on_change
        self._children: dict[str, Child] = {}
        self._restarts = dict.fromkeys((spec.name for spec in specs), 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._unclean: list[str] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, timeout_s: float) -> None:
        """Start all children and wait until all are ready.

        Raises:
            Unavailable: not all were ready in time, or a child died and the policy says that this ends the fleet.
        """
        deadline = Deadline.after(timeout_s)
        for stage in START_STAGES:
            specs = [spec for spec in self._specs if spec.kind in stage]
            if specs:
                self._screen.say(f"starting {', '.join(spec.name for spec in specs)}")
            self._tasks += [asyncio.create_task(self._keep(spec)) for spec in specs]
            await self.unless_failed(self._all_ready(specs, deadline))

    async def unless_failed(self, work: Awaitable[T]) -> T:
        """Wait for `work`, unless the fleet fails before: then cancel it and raise.

        Raises:
            Unavailable: a child died, and the policy says that this ends the fleet.
        """
        task = asyncio.ensure_future(work)
        first: set[asyncio.Future[Any]] = {task, self._failed}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return task.result()
        finally:
            task.cancel()

    async def drain(self) -> tuple[str, ...]:
        """End all children in order, each stage within its bound; return the names of those that did not end well."""
        self._draining = True
        for stage in DRAIN_STAGES:
            children = [child for child in self._children.values() if child.spec.kind in stage and child.running]
            if not children:
                continue
            self._screen.say(f"draining {', '.join(child.spec.name for child in children)}")
            for child in children:
                child.drain()
            await self._ended(children)
        await self._finish()
        return tuple(self._unclean)

    def kill(self) -> None:
        """End all children now."""
        self._draining = True
        for child in self._children.values():
            child.kill()

    async def _ended(self, children: Sequence[Child]) -> None:
        waits = {asyncio.create_task(child.wait()): child for child in children}
        _, late = await asyncio.wait(waits, timeout=self._drain_timeout_s + DRAIN_MARGIN_S)
        for wait in late:
            self._screen.say(f"{waits[wait].spec.name} did not end in time; killing it")
            waits[wait].kill()
        if late:
            await asyncio.wait(late, timeout=KILL_TIMEOUT_S)
        for wait, child in waits.items():
            if not wait.done() or wait.result() not in ENDED_WELL:
                how = describe_exit(wait.result()) if wait.done() else "still there"
                self._unclean.append(f"{child.spec.name} ({how})")
            wait.cancel()

    async def _finish(self) -> None:
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=KILL_TIMEOUT_S)
            for task in late:
                task.cancel()
        if self._failed.done():
            self._failed.exception()

    async def _keep(self, spec: ChildSpec) -> None:
        """Keep one child running until the fleet ends."""
        try:
            while not self._draining:
                child = await self._start(spec)
                back = asyncio.create_task(self._tell_when_back(spec)) if self._restarts[spec.name] else None
                code = await child.wait()
                if back is not None:
                    back.cancel()
                if self._draining:
                    return
                self._died(child, code)
        except Exception as error:  # noqa: BLE001 - whatever stops the supervision of a child ends the fleet
            self._fail(error if isinstance(error, KvrelayError) else Unavailable(f"{spec.name} cannot run: {error}"))

    async def _start(self, spec: ChildSpec) -> Child:
        child = self._children[spec.name] = await Child.start(spec, self._screen.log)
        if self._draining:
            child.kill()
        self._on_change(tuple(self._record(child) for child in self._children.values()))
        return child

    def _died(self, child: Child, code: int) -> None:
        name, how = child.spec.name, describe_exit(code)
        action = self._policy.died(name)
        if action is Action.RESTART:
            self._restarts[name] += 1
            self._screen.say(f"{name} ended ({how}); starting it again")
            return
        often = f" {CRASHES_MAX} times in {CRASH_WINDOW_S:g} s" if action is Action.GIVE_UP else ""
        raise self._explained(name, f"ended{often} ({how})")

    def _explained(self, name: str, what: str) -> Unavailable:
        child = self._children.get(name)
        lines = [as_text(line).text for line in child.last_lines] if child else ()
        return Unavailable("\n  ".join([f"{name} {what}; its last lines:", *(lines or ("(none)",))]))

    def _fail(self, error: KvrelayError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _all_ready(self, specs: Sequence[ChildSpec], deadline: Deadline) -> None:
        waiting = list(specs)
        while waiting:
            ready = await asyncio.gather(*(self._probe(spec) for spec in waiting))
            for spec, is_ready in zip(waiting, ready, strict=True):
                if is_ready:
                    self._screen.say(f"{spec.name} is ready")
            waiting = [spec for spec, is_ready in zip(waiting, ready, strict=True) if not is_ready]
            if waiting and deadline.expired:
                raise self._explained(waiting[0].name, "was not ready in time")
            if waiting:
                await asyncio.sleep(PROBE_INTERVAL_S)

    async def _tell_when_back(self, spec: ChildSpec) -> None:
        while not await self._probe(spec):  # noqa: ASYNC110 - the child is another process: no event to wait for
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._screen.say(f"{spec.name} is back")

    def _record(self, child: Child) -> ChildRecord:
        return ChildRecord(
            name=child.spec.name,
            kind=child.spec.kind,
            address=child.spec.address,
            pid=child.pid,
            start_ticks=child.start_ticks,
            restarts=self._restarts[child.spec.name],
        )
