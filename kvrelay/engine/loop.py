"""The engine's own thread: builds the engine, then turns commands into events until it is told to stop."""

import contextlib
import logging
import queue
import traceback
from typing import Final, TypeAlias

from kvrelay.config import EngineConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.protocol import Command, EngineDied, Event
from kvrelay.engine.runner import Runner
from kvrelay.errors import InternalError, KvrelayError
from kvrelay.kv.transfer import Transfer

log = logging.getLogger(__name__)

Commands: TypeAlias = "queue.Queue[Command]"
Events: TypeAlias = "queue.Queue[Event]"

IDLE_WAKE_S: Final = 1.0
"""Longest sleep of an idle engine. Nothing is due then; it bounds what a lost wake-up could cost."""
COMMANDS_PER_STEP: Final = 256
"""Commands taken between two steps, so that a flood of them does not stop the running answers."""
EVENT_STALL_S: Final = 60.0
"""A front that has taken no event for this long is gone or stuck: the engine ends rather than fill the memory."""


def run_engine(config: EngineConfig, *, replica_id: str, incarnation: str, commands: Commands, events: Events) -> None:
    """Build an engine and serve until Stop. Whatever goes wrong is told as EngineDied, never raised."""

    def emit(event: Event) -> None:
        events.put(event, timeout=EVENT_STALL_S)

    try:
        core = EngineCore(
            config,
            make_runner(config),
            make_transfer(f"{replica_id}-{incarnation}"),
            replica_id=replica_id,
            incarnation=incarnation,
            emit=emit,
        )
        try:
            _serve(core, commands)
        finally:
            core.close()
    except queue.Full:
        log.exception("front_stalled", extra={"replica_id": replica_id, "stall_s": EVENT_STALL_S})
    except Exception as error:  # the last stop: a broken engine must be told, whatever broke it
        log.exception("engine_died", extra={"replica_id": replica_id})
        told = error if isinstance(error, KvrelayError) else InternalError("the engine broke; its log tells why")
        with contextlib.suppress(queue.Full):  # then the front notices that the engine no longer runs
            events.put(EngineDied(error=told, detail=traceback.format_exc()), timeout=EVENT_STALL_S)


def make_runner(config: EngineConfig) -> Runner:
    """Build what computes: the mock or the model; each is imported only when it is asked for.

    Raises:
        KvrelayError: the model cannot be loaded.
    """
    if config.engine == "mock":
        from kvrelay.engine.mock import MockRunner  # noqa: PLC0415 - the real engine does without

        return MockRunner(config)
    from kvrelay.engine.torch_runner import TorchRunner  # noqa: PLC0415 - the mock does without torch

    return TorchRunner(config)


def make_transfer(agent_name: str) -> Transfer:
    """Build this replica's end of the KV network."""
    from kvrelay.kv.nixl import NixlTransfer  # noqa: PLC0415 - loading it takes a while and a worker install

    return NixlTransfer(agent_name=agent_name)


def _serve(core: EngineCore, commands: Commands) -> None:
    busy = True
    while not core.ended:
        for command in _take(commands, 0.0 if busy else min(core.next_wake_s(), IDLE_WAKE_S)):
            core.handle(command)
        busy = core.step()


def _take(commands: Commands, timeout_s: float) -> list[Command]:
    """Return the commands that are there; wait for the first one up to `timeout_s`."""
    taken: list[Command] = []
    try:
        taken.append(commands.get(timeout=timeout_s) if timeout_s > 0 else commands.get_nowait())
        while len(taken) < COMMANDS_PER_STEP:
            taken.append(commands.get_nowait())
    except queue.Empty:
        pass
    return taken
