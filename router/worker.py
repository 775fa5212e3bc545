"""The router process."""

import asyncio
import contextlib
from random import Random, SystemRandom
from typing import Final

from kvrelay.config import RouterConfig
from kvrelay.errors import KvrelayError
from kvrelay.model.files import ModelFiles, resolve
from kvrelay.model.text import TextModel, load_text
from kvrelay.rpc.channel import Channels
from kvrelay.rpc.decode_client import DecodeClient, DecodeOrder, DecodeStream
from kvrelay.rpc.registry_client import RegistryClient
from kvrelay.rpc.server import RpcServer, run
from kvrelay.telemetry import Telemetry
from kvrelay.types import Peer
from router.core import RouterCore
from router.service import SERVICE, RouterService
from router.text import RouterText

EXIT_BROKEN: Final = 1
"""Exit code when the model's text cannot be loaded, or the router's own work broke."""


class Router:
    """A router in this process. Make it inside the running loop.

    It listens before its model's text is loaded, and is healthy once that is done and its mirror has caught up.

    Attributes:
        server: the gRPC server.
        core: what serves; None until the text is loaded.
    """

    def __init__(self, config: RouterConfig, telemetry: Telemetry, *, rng: Random | None = None) -> None:
        self.server = RpcServer(config, name="router", telemetry=telemetry)
        self.core: RouterCore | None = None
        self._config = config
        self._telemetry = telemetry
        self._rng = rng or SystemRandom()
        self._channels = Channels()
        self._service = RouterService(request_deadline_s=config.request_deadline_s)
        self._text: RouterText | None = None
        self._task: asyncio.Task[None] | None = None
        self._service.add_to(self.server.grpc)
        self.server.services([SERVICE])
        self.server.health.set_check(SERVICE, self.ready)

    def ready(self) -> bool:
        """True once requests can be served."""
        return self.core is not None and self.core.ready()

    async def start(self) -> str:
        """Listen, begin to load and to watch, and return the advertised "host:port"."""
        address = await self.server.start()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._broke)
        return address

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
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
            self._task = None
        await self._channels.close()
        if self._text is not None:
            self._text.close()

    async def _run(self) -> None:
        files, model = await asyncio.to_thread(self._load)
        self._text = RouterText(model)
        self.core = RouterCore(
            self._config,
            model=self._config.model_alias or files.alias,
            text=self._text,
            registry=RegistryClient(self._channels.get(self._config.registry)),
            start_decode=self._start_decode,
            telemetry=self._telemetry,
            rng=self._rng,
        )
        self._service.core = self.core
        await self.core.run()

    def _load(self) -> tuple[ModelFiles, TextModel]:
        logger = self._telemetry.logger
        files = resolve(self._config.model, progress=lambda step: logger.info("model.progress", step=step))
        return files, load_text(files)

    def _start_decode(self, peer: Peer, order: DecodeOrder, timeout_s: float) -> DecodeStream:
        return DecodeClient(self._channels.get(peer.address)).generate(order, timeout_s=timeout_s)

    def _broke(self, task: "asyncio.Task[None]") -> None:
        """The work that runs for ever has ended: a router that cannot do it must not look alive."""
        if task.cancelled():
            return
        error = task.exception()
        known = isinstance(error, KvrelayError)
        self._telemetry.logger.error("router.broke", reason=str(error), exc_info=None if known else error)
        self.server.end(EXIT_BROKEN)


def main(config: RouterConfig) -> int:
    """Run the router until a signal ends it; return the exit code."""
    telemetry = Telemetry.start("router", f"{config.advertise or config.bind}:{config.port}", config)

    async def serve() -> int:
        return await Router(config, telemetry).serve()

    try:
        return run(serve())
    finally:
        telemetry.shutdown()
