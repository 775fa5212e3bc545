"""An engine in a process of its own: two pipes, with a pumping thread on each blocking end.

front: send() → queue → pump ──pipe──> pump → queue → engine
       receive() <──────────pipe────── pump ← queue ←
"""

import multiprocessing as mp
import queue
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Final

from kvrelay.config import EngineConfig
from kvrelay.engine.loop import Commands, Events, run_engine
from kvrelay.engine.protocol import Command, EngineDied, Event, Stop
from kvrelay.engine.side import COMMANDS_MAX, EVENTS_MAX, CommandQueue, receive_from
from kvrelay.errors import Unavailable

PUMP_WAKE_S: Final = 0.2
"""How often a pump with nothing to do looks whether it should end."""
FLUSH_S: Final = 5.0
"""Longest time an ended engine spends on handing over its last events."""
KILL_S: Final = 1.0
"""Between asking a process to end and killing it."""


class ProcessSide:
    """An engine in a spawned process. See `EngineSide`."""

    def __init__(self, config: EngineConfig, *, replica_id: str, incarnation: str) -> None:
        context = mp.get_context("spawn")
        self._commands = CommandQueue(config)
        self._closing = threading.Event()
        self._lost = False
        command_reader, self._command_writer = context.Pipe(duplex=False)
        self._event_reader, event_writer = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_engine_process,
            args=(config, replica_id, incarnation, command_reader, event_writer),
            name=f"engine {replica_id}",
            daemon=True,  # ends with its parent
        )
        self._process.start()
        # The child's ends must be open in the child only: then its death is the end of the pipe.
        command_reader.close()
        event_writer.close()
        self._pump = threading.Thread(target=self._pump_commands, name=f"commands {replica_id}", daemon=True)
        self._pump.start()

    def send(self, command: Command) -> None:
        """Queue a command."""
        self._commands.put(command)

    def receive(self, timeout_s: float) -> list[Event]:
        """Return events; a process that ended without being asked is told as EngineDied, once."""
        try:
            if self._lost:
                time.sleep(timeout_s)  # nothing will ever come; the caller expects to be held back
                return []
            if not self._event_reader.poll(timeout_s):
                return []
            events: list[Event] = self._event_reader.recv()
        except (EOFError, OSError):
            return self._farewell()
        return events

    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self._process.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """End the process: asked first, then terminated, then killed."""
        self._closing.set()
        self._commands.put_stop(timeout_s)
        self._process.join(timeout_s)
        ended_by_itself = self._process.exitcode is not None
        for end in (self._process.terminate, self._process.kill):
            if self._process.exitcode is None:
                end()
                self._process.join(KILL_S)
        self._pump.join(PUMP_WAKE_S)
        return ended_by_itself

    def _farewell(self) -> list[Event]:
        self._lost = True
        if self._closing.is_set():
            return []
        self._process.join(KILL_S)
        error = Unavailable(f"the engine's process ended with code {self._process.exitcode}; the replica must restart")
        return [EngineDied(error=error)]

    def _pump_commands(self) -> None:
        with self._command_writer:
            while self._process.is_alive():
                try:
                    command = self._commands.queue.get(timeout=PUMP_WAKE_S)
                    self._command_writer.send(command)
                except queue.Empty:
                    continue
                except OSError:
                    return  # the process has ended; receive() tells


def _engine_process(
    config: EngineConfig,
    replica_id: str,
    incarnation: str,
    command_reader: "Connection[Any, Any]",
    event_writer: "Connection[Any, Any]",
) -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front drains and then stops us
    commands: Commands = queue.Queue(COMMANDS_MAX)
    events: Events = queue.Queue(EVENTS_MAX)
    ended = threading.Event()
    threading.Thread(target=_pump_in, args=(command_reader, commands), name="commands", daemon=True).start()
    pump = threading.Thread(target=_pump_out, args=(events, event_writer, ended), name="events", daemon=True)
    pump.start()
    run_engine(config, replica_id=replica_id, incarnation=incarnation, commands=commands, events=events)
    ended.set()
    pump.join(FLUSH_S)


def _pump_in(reader: "Connection[Any, Any]", commands: Commands) -> None:
    # A full queue holds this thread, then the pipe, then the front's queue, which refuses.
    try:
        while True:
            commands.put(reader.recv())  # bounded by the life of this process: the engine takes or ends
    except (EOFError, OSError):
        commands.put(Stop())  # the front is gone


def _pump_out(events: Events, writer: "Connection[Any, Any]", ended: threading.Event) -> None:
    try:
        while not (ended.is_set() and events.empty()):
            batch = receive_from(events, PUMP_WAKE_S)
            if batch:
                writer.send(batch)
    except OSError:
        return  # the front is gone; the other pump stops the engine
