"""The front's handle on an engine side, in a thread of this process or in a process of its own."""

import contextlib
import queue
import threading
from typing import Final, Protocol

from kvrelay.config import EngineConfig
from kvrelay.engine.loop import Commands, Events, run_engine
from kvrelay.engine.protocol import Command, Event, Generate, LeasePrefix, Prefill, Stop
from kvrelay.errors import ResourceExhausted

COMMANDS_MAX: Final = 4096
"""Commands on their way. New work is refused long before (`queue_jobs`), so that what ends work still gets through."""
EVENTS_MAX: Final = 65_536
"""Events on their way: seconds of tokens of a full batch, which a front takes in milliseconds."""
EVENTS_PER_RECEIVE: Final = 1024
"""Events handed to the front at once."""


class EngineSide(Protocol):
    """An engine side as the front sees it. `receive` is called from one thread, the others from any."""

    def send(self, command: Command) -> None:
        """Queue a command; never blocks.

        Raises:
            ResourceExhausted: the queue is full; new work is refused before cancels and orders are.
        """
        ...

    def receive(self, timeout_s: float) -> list[Event]:
        """Return events in order; waits for the first one, and returns an empty list when none comes in time."""
        ...

    def alive(self) -> bool:
        """Tell whether the thread or process runs."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """End the engine: running jobs fail as Unavailable. Returns False if it had not ended by itself in time."""
        ...


def start_engine(config: EngineConfig, *, replica_id: str, incarnation: str) -> EngineSide:
    """Start an engine side where `config.engine_side` says; its first event is Started (or EngineDied)."""
    if config.engine_side == "process":
        from kvrelay.engine.process_side import ProcessSide  # noqa: PLC0415 - a thread does without multiprocessing

        return ProcessSide(config, replica_id=replica_id, incarnation=incarnation)
    return ThreadSide(config, replica_id=replica_id, incarnation=incarnation)


class CommandQueue:
    """The bounded queue of commands."""

    def __init__(self, config: EngineConfig) -> None:
        self.queue: Commands = queue.Queue(COMMANDS_MAX)
        self._new_work_max = min(config.queue_jobs, COMMANDS_MAX // 2)

    def put(self, command: Command) -> None:
        """Queue a command without blocking.

        Raises:
            ResourceExhausted: the queue is full.
        """
        new_work = isinstance(command, Generate | Prefill | LeasePrefix)
        if new_work and self.queue.qsize() >= self._new_work_max:
            raise ResourceExhausted("the engine has not yet taken what was sent before; try again or elsewhere")
        try:
            self.queue.put_nowait(command)
        except queue.Full:
            raise ResourceExhausted("the engine takes no commands; it is overloaded or stuck") from None

    def put_stop(self, timeout_s: float) -> None:
        """Queue Stop, behind what is there; given up silently when there is no place in time."""
        with contextlib.suppress(queue.Full):
            self.queue.put(Stop(), timeout=timeout_s)


def receive_from(events: Events, timeout_s: float) -> list[Event]:
    """Take what is there from a queue; wait for the first event up to `timeout_s`."""
    taken: list[Event] = []
    try:
        taken.append(events.get(timeout=timeout_s))
        while len(taken) < EVENTS_PER_RECEIVE:
            taken.append(events.get_nowait())
    except queue.Empty:
        pass
    return taken


class ThreadSide:
    """An engine in a thread of this process."""

    def __init__(self, config: EngineConfig, *, replica_id: str, incarnation: str) -> None:
        self._commands = CommandQueue(config)
        self._events: Events = queue.Queue(EVENTS_MAX)
        self._thread = threading.Thread(
            target=run_engine,
            args=(config,),
            kwargs={
                "replica_id": replica_id,
                "incarnation": incarnation,
                "commands": self._commands.queue,
                "events": self._events,
            },
            name=f"engine {replica_id}",
            daemon=True,  # a wedged engine must not keep the process from ending
        )
        self._thread.start()

    def send(self, command: Command) -> None:
        """Queue a command; see `EngineSide`."""
        self._commands.put(command)

    def receive(self, timeout_s: float) -> list[Event]:
        """Return events; see `EngineSide`."""
        return receive_from(self._events, timeout_s)

    def alive(self) -> bool:
        """Tell whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """End the engine; see `EngineSide`. A thread that does not end is left behind."""
        if self._thread.is_alive():
            self._commands.put_stop(timeout_s)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
