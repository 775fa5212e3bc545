"""Life of a gRPC server: bind, advertise, serve, drain at the first signal, end at the second."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.config import ServerConfig
from kvrelay.errors import InvalidArgument
from kvrelay.logs import get_logger, route_stdlib_logs
from kvrelay.rpc import address, options
from kvrelay.rpc.health import Health
from kvrelay.rpc.interceptor import CallInterceptor
from kvrelay.telemetry import Telemetry

CONCURRENT_CALLS_MAX: Final = 8192
"""Calls served at once; over it gRPC answers RESOURCE_EXHAUSTED. Far above what any queue behind admits."""

STOP_GRACE_S: Final = 0.5
"""What is still open after a drain (watches, calls over their time) gets this long to see its end."""

EXIT_CUT_OFF: Final = 1
"""Exit code when the drain's time was over before its work."""

EXIT_FORCED_BASE: Final = 128
"""Exit code at the second signal: this plus the signal's number, as shells have it."""


class RpcServer:
    """A gRPC server with health, reflection and channelz. Make it inside the running loop.

    Attributes:
        grpc: the server itself; add servicers before `start`.
        health: health checks; every service is healthy unless its check says otherwise.
        address: advertised "host:port"; empty before `start`.
    """

    def __init__(self, config: ServerConfig, *, name: str, telemetry: Telemetry) -> None:
        """Prepare a server; nothing listens yet.

        Raises:
            InvalidArgument: no usable address to advertise follows from the configuration.
        """
        self._config = config
        self._host = address.advertised_host(config.bind, config.advertise)
        self._logger = telemetry.logger.bind(server=name)
        self._calls = CallInterceptor(telemetry)
        self._services: list[str] = []
        self._ending = asyncio.Event()
        self._exit_code = 0
        self._ticker: asyncio.Task[None] | None = None
        self.address = ""
        self.health = Health(self._logger)
        self.grpc = grpc.aio.server(
            interceptors=[self._calls], options=options.SERVER, maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX
        )

    @property
    def draining(self) -> bool:
        """True once no new work is taken."""
        return self._calls.draining

    @property
    def running(self) -> int:
        """Calls under way, endless watches aside."""
        return self._calls.running

    def services(self, names: Iterable[str]) -> None:
        """Name the services served (full names): they are reflected, and healthy unless `health.set_check` differs."""
        for name in names:
            self._services.append(name)
            if not self.health.knows(name):
                self.health.set_check(name, _always)

    async def start(self) -> str:
        """Listen, and return the advertised "host:port".

        Raises:
            InvalidArgument: the address cannot be listened on.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        channelz.add_channelz_servicer(self.grpc)
        reflected = [*self._services, *_own_services(), reflection.SERVICE_NAME]
        reflection.enable_server_reflection(reflected, self.grpc)
        wanted = address.join(self._config.bind or "0.0.0.0", self._config.port)  # noqa: S104 - empty means all
        try:
            port = self.grpc.add_insecure_port(wanted)
        except RuntimeError as error:
            raise InvalidArgument("port", f"cannot listen on {wanted}; is another process using it?") from error
        await self.grpc.start()
        self._ticker = asyncio.get_running_loop().create_task(self.health.watch_checks())
        self.address = address.join(self._host, port)
        self._logger.info("server.started", address=self.address, bind=wanted)
        return self.address

    def end(self, exit_code: int = 0) -> None:
        """Begin the drain as a first signal would; `serve` then returns `exit_code`. From the loop's thread."""
        self._exit_code = self._exit_code or exit_code
        self._ending.set()

    async def serve(self, *, drain: Callable[[], Awaitable[None]] | None = None) -> int:
        """Serve until SIGTERM, SIGINT or `end`, drain, stop, and return the exit code.

        Draining: health turns, new work is refused, `drain` runs and running calls end, all within
        `drain_timeout_s`. A second signal ends the process at once.
        """
        if not self.address:
            await self.start()
        with self._signals():
            await self._ending.wait()
            drained = await self._drain(drain)
            await self.stop(STOP_GRACE_S)
        return self._exit_code or (0 if drained else EXIT_CUT_OFF)

    async def stop(self, grace_s: float) -> None:
        """Stop listening; calls still running after `grace_s` are cancelled. Stopping twice is no error."""
        self._calls.draining = True
        await self.health.drain()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        await self.grpc.stop(grace_s)

    async def _drain(self, drain: Callable[[], Awaitable[None]] | None) -> bool:
        self._calls.draining = True
        self._logger.info("server.draining", running=self.running, timeout_s=self._config.drain_timeout_s)
        await self.health.drain()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                if drain is not None:
                    await drain()
                await self._calls.idle()
        except TimeoutError:
            self._logger.warning("server.drain_cut_off", running=self.running)
            return False
        except Exception:
            self._logger.exception("server.drain_failed", running=self.running)
            return False
        self._logger.info("server.drained")
        return True

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT while inside; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        first = True

        def received(number: int, _frame: FrameType | None) -> None:
            # A plain handler, not one of the loop's: the second signal must end a process whose loop is stuck.
            nonlocal first
            if not first:
                with suppress(Exception):  # the interrupted code may be inside this very stream
                    sys.stderr.flush()
                os._exit(EXIT_FORCED_BASE + number)
            first = False
            loop.call_soon_threadsafe(self.end)

        before = {number: signal.signal(number, received) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a process's main coroutine, on uvloop where there is one, and return its exit code."""
    route_stdlib_logs(get_logger("library", level="warning"))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - optional: not on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop


def _own_services() -> tuple[str, ...]:
    return (health.SERVICE_NAME, "grpc.channelz.v1.Channelz")


def _always() -> bool:
    return True
