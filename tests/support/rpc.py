"""A real server and a real channel in one process, for tests of what lies between them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrelay import errors
from kvrelay.config import ServerConfig
from kvrelay.rpc.channel import PeerChannel, open_channel
from kvrelay.rpc.server import RpcServer
from kvrelay.telemetry import Telemetry

CALL_S = 20.0
"""Timeout of calls that are expected to answer at once."""

WAIT_S = 20.0
"""Longest wait for a condition, about ten times what is promised."""


TREE = [
    errors.InvalidArgument("sampling.temperature", "3 is not in [0, 2]"),
    errors.NotFound("no block of this prefix is held"),
    errors.FailedPrecondition("start the registry first"),
    errors.Mismatch("block_tokens", 32, 64),
    errors.StaleIncarnation("the replica was restarted"),
    errors.ResourceExhausted("the queue is full", retry_after_s=2.5),
    errors.Unavailable("no replica is ready"),
    errors.PeerLost("the peer hangs"),
    errors.Draining("shutting down"),
    errors.DeadlineExceeded("too late"),
    errors.Cancelled("the caller went away"),
    errors.Unauthenticated("no credential"),
    errors.InternalError("the engine died"),
]
"""One of each class of errors, with every field given."""


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition and print how long it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < WAIT_S, f"never happened: {what}"
        await asyncio.sleep(0.005)
    print(f"{what}: {time.monotonic() - began_s:.3f} s")


@asynccontextmanager
async def serving(
    add: Callable[[RpcServer], None], *, config: ServerConfig | None = None, telemetry: Telemetry | None = None
) -> AsyncIterator[tuple[RpcServer, PeerChannel]]:
    """Serve what `add` adds, on a free port, and give the server and a channel to it."""
    config = config or ServerConfig()
    own = telemetry is None
    telemetry = telemetry or Telemetry.start("test", "test-0", config)
    server = RpcServer(config, name="test", telemetry=telemetry)
    add(server)
    channel = open_channel(await server.start())
    try:
        yield server, channel
    finally:
        await channel.close()
        await server.stop(0)
        if own:
            telemetry.shutdown()
