"""One replica process: puts engine, server and membership together, and takes them apart in order."""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace

from kvrelay.config import ReplicaConfig
from kvrelay.errors import KvrelayError
from kvrelay.kv.keys import make_identity
from kvrelay.model.files import resolve
from kvrelay.replica.blocks import BlockLedger
from kvrelay.replica.bridge import EngineBridge
from kvrelay.replica.membership import Membership
from kvrelay.replica.peers import Peers
from kvrelay.replica.prefix_pull import PrefixPull
from kvrelay.replica.service import KvSource
from kvrelay.replica.tier_log import TierLog
from kvrelay.rpc.channel import Channels
from kvrelay.rpc.server import RpcServer, run
from kvrelay.telemetry import Telemetry
from kvrelay.types import ModelIdentity, Peer, Replica, ReplicaState, Role
from kvrelay.v1 import kv_source_pb2_grpc

ENGINE_START_TIMEOUT_S = 600.0
"""Longest start of an engine: reading and converting a large model's weights takes minutes."""

EXIT_BROKEN = 1
"""Exit code after the engine died or the registry refused the replica."""

Install = Callable[["ReplicaProcess"], None]


class ReplicaProcess:
    """A replica of one role: the services added to it, `KvSource`, an engine, and an entry in the registry.

    Attributes:
        config: as given.
        role: what it does.
        replica_id: stable name.
        incarnation: random name of this start.
        telemetry: traces, metrics, log.
        bridge: the engine.
        channels: connections to other replicas; after `start`.
        peers: what it knows of those that it pulls from; after the engine is up.
        prefix_pull: loads prefixes that other replicas hold; after the engine is up.
        server: the gRPC server; after `start`.
        identity: what it serves; after the engine is up.
        peer: who it is to others; after `start`.
    """

    channels: Channels
    peers: Peers
    prefix_pull: PrefixPull
    server: RpcServer
    identity: ModelIdentity
    peer: Peer

    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self.role = Role(config.role)
        self.incarnation = secrets.token_hex(8)
        self.replica_id = config.replica_id or f"{config.role}-{config.port or self.incarnation[:6]}"
        self.telemetry = Telemetry.start(config.role, self.replica_id, config)
        self.bridge = EngineBridge(config, replica_id=self.replica_id, incarnation=self.incarnation)
        self._ledger = BlockLedger()
        self._membership: Membership | None = None
        self._installs: list[tuple[str, Install]] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []

    # ------------------------------------------------------------ composition

    def add_service(self, name: str, install: Install) -> None:
        """Have a service added when the server is made; `name` is its full name.

        `install` is called once the engine is up and before the server listens: `bridge.started`, `identity`,
        `channels`, `peers`, `prefix_pull` and `server` are there, `peer` is not yet.
        """
        self._installs.append((name, install))

    def on_stop(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have something awaited when the replica stops, while connections still stand; it must be bounded in time."""
        self._closers.append(close)

    # ------------------------------------------------------------ life

    def run(self) -> int:
        """Run the process until a signal, and return its exit code."""
        return run(self._main())

    async def start(self) -> str:
        """Start engine, server and membership; return the advertised "host:port".

        Raises:
            KvrelayError: one of them could not be started; nothing is left running.
        """
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def serve(self) -> int:
        """Serve until a signal, the engine's death or the registry's refusal; drain; return the exit code."""
        watch = asyncio.create_task(self._watch_engine(), name="engine watch")
        try:
            return await self.server.serve(drain=self._drain)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self.stop()

    async def stop(self) -> None:
        """Stop everything at once, leaving the registry properly. Calling it twice is no error."""
        if self._membership is not None:
            await self._membership.stop(deregister=True)
        for close in self._closers:
            await close()
        self._closers.clear()
        if hasattr(self, "server"):
            await self.server.stop(0)
            await self.channels.close()
        await self.bridge.stop()
        self.telemetry.shutdown()

    async def _main(self) -> int:
        try:
            await self.start()
        except KvrelayError as error:
            self.telemetry.logger.exception("replica_failed", error=error.message)
            return EXIT_BROKEN
        return await self.serve()

    async def _start(self) -> str:
        self._loop = asyncio.get_running_loop()
        self.bridge.on_blocks(lambda event: self._ledger.change(event.added, event.removed))
        self.bridge.on_tier(TierLog(self.telemetry))
        started = await self.bridge.start(timeout_s=ENGINE_START_TIMEOUT_S)
        self.identity = make_identity(
            model=await asyncio.to_thread(self._alias),
            model_fingerprint=started.model_fingerprint,
            tokenizer_fingerprint=started.tokenizer_fingerprint,
            block_tokens=started.agent.layout.block_tokens,
            context_tokens=started.context_tokens,
        )
        self.channels = Channels()
        self.peers = Peers(self.channels, me=lambda: self.peer, agent=started.agent, identity=self.identity)
        self.on_stop(self.peers.settle)
        self.prefix_pull = PrefixPull(self.bridge, self.peers, self.telemetry, lease_ttl_s=self.config.lease_ttl_s)
        self.server = RpcServer(self.config, name=self.replica_id, telemetry=self.telemetry)
        self._install_services()
        address = await self.server.start()
        self.peer = Peer(self.replica_id, self.incarnation, address)
        self._join()
        self.telemetry.logger.info(
            "replica_ready",
            address=address,
            role=self.role.value,
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            model=self.identity.model,
            pages=started.agent.pages,
        )
        return address

    def _alias(self) -> str:
        return self.config.model_alias or resolve("mock" if self.config.engine == "mock" else self.config.model).alias

    def _install_services(self) -> None:
        kv_source_pb2_grpc.add_KvSourceServicer_to_server(KvSource(self), self.server.grpc)
        names = ["kvrelay.v1.KvSource"]
        for name, install in self._installs:
            install(self)
            names.append(name)
        self.server.services(names)
        for name in names:
            # A wedged engine must never report healthy, whichever service is asked for.
            self.server.health.set_check(name, lambda: self.bridge.ready)

    # ------------------------------------------------------------ membership

    def _join(self) -> None:
        if not self.config.registry:
            return
        agent = self.bridge.started.agent
        self._membership = Membership(
            Replica(
                peer=self.peer,
                role=self.role,
                identity=self.identity,
                layout=agent.layout,
                pages=agent.pages,
                max_sequences=self.config.max_sequences,
            ),
            registry=self.config.registry,
            ledger=self._ledger,
            state=self._state,
            on_refused=self._on_refused,
            heartbeat_interval_s=self.config.heartbeat_interval_s,
            ttl_s=self.config.liveness_ttl_s,
            log_level=self.config.log_level,
        )
        self._membership.start()

    def _state(self) -> ReplicaState:
        return replace(self.bridge.state, draining=self.server.draining, ready=self.bridge.ready)

    def _on_refused(self, error: KvrelayError) -> None:
        self.telemetry.logger.error("replica_refused", error=error.message)
        with contextlib.suppress(RuntimeError):  # the loop has ended: so has the process
            self._loop.call_soon_threadsafe(self.server.end, EXIT_BROKEN)

    # ------------------------------------------------------------ ends

    async def _watch_engine(self) -> None:
        error = await self.bridge.died()
        self.telemetry.logger.error("engine_died", error=error.message)
        self.server.end(EXIT_BROKEN)

    async def _drain(self) -> None:
        """Tell routers, then wait until nothing that others still want lies here; the server bounds the time."""
        if self._membership is not None:
            self._membership.nudge()
        await self.bridge.idle()
