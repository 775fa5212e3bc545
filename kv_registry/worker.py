"""The registry process."""

import asyncio

from opentelemetry.metrics import Observation

from kv_registry.feed import Feeds
from kv_registry.service import SERVICE, RegistryService, add_to
from kv_registry.store import Store
from kv_registry.sweeper import Sweeper
from kvrelay.config import RegistryConfig
from kvrelay.rpc.server import RpcServer, run
from kvrelay.telemetry import Telemetry


class Registry:
    """A registry in this process. Make it inside the running loop.

    Its health is that of the store: it goes on serving while Redis is away, with UNAVAILABLE, and recovers by itself.
    """

    def __init__(self, config: RegistryConfig, telemetry: Telemetry) -> None:
        self._store = Store(config.redis_url)
        self._sweeper = Sweeper(self._store, telemetry.logger)
        self._task: asyncio.Task[None] | None = None
        self.server = RpcServer(config, name="kv_registry", telemetry=telemetry)
        self._feeds = Feeds(self._store.events, telemetry.logger)
        add_to(self.server.grpc, RegistryService(self._store, self._feeds))
        self.server.services([SERVICE])
        self.server.health.set_check(SERVICE, lambda: self._sweeper.store_answers)
        telemetry.meter.create_observable_gauge(
            "kvrelay.registry.store_up",
            callbacks=[lambda _: [Observation(int(self._sweeper.store_answers))]],
            unit="1",
            description="1 while Redis answers, 0 while the registry is degraded",
        )

    async def start(self) -> str:
        """Start, and return the advertised "host:port". Redis need not be there yet."""
        self._task = asyncio.get_running_loop().create_task(self._sweeper.run())
        return await self.server.start()

    async def serve(self) -> int:
        """Serve until a signal, and return the exit code."""
        await self.start()
        try:
            return await self.server.serve()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop at once. Stopping twice is no error."""
        await self.server.stop(0)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._store.close()


def main(config: RegistryConfig) -> int:
    """Run the registry until a signal ends it; return the exit code."""
    telemetry = Telemetry.start("kv_registry", f"{config.advertise or config.bind}:{config.port}", config)

    async def serve() -> int:
        return await Registry(config, telemetry).serve()

    try:
        return run(serve())
    finally:
        telemetry.shutdown()
