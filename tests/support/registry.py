"""Registries in this process over a real store, replicas to register with them, and a mirror that follows them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from kv_registry.worker import Registry
from kvrelay.config import RegistryConfig
from kvrelay.directory import (
    BlockBatch,
    BlocksSeen,
    CaughtUp,
    ReplicaBeat,
    ReplicaGone,
    ReplicaSeen,
    Reset,
    Watched,
)
from kvrelay.kv.keys import make_identity, xor_keys
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.registry_client import RegistryClient
from kvrelay.telemetry import Telemetry
from kvrelay.types import KvLayout, Peer, Replica, ReplicaState, Role

MODEL = "model-a"
CALL_S = 20.0
"""Timeout of calls that are expected to answer at once."""
TTL_S = 30.0
"""Life of members in tests that are not about expiry."""
IDENTITY = make_identity(
    model=MODEL, model_fingerprint="f1", tokenizer_fingerprint="t1", block_tokens=32, context_tokens=8192
)
LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=16, dtype="float32", page_tokens=32, block_tokens=32, page_bytes=8192)


def replica_of(replica_id: str, incarnation: str = "a1", **changes) -> Replica:
    base = Replica(
        peer=Peer(replica_id, incarnation, f"host-{replica_id}:1"),
        role=Role.BOTH,
        identity=IDENTITY,
        layout=LAYOUT,
        pages=64,
        max_sequences=8,
    )
    return replace(base, **changes)


def keys_of(seed: int, count: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(16) for _ in range(count)]


@asynccontextmanager
async def registry(redis_url: str) -> AsyncIterator[tuple[Registry, RegistryClient]]:
    """A registry on a free port, and a client of it."""
    config = RegistryConfig(port=0, redis_url=redis_url)
    telemetry = Telemetry.start("kv_registry", "test", config)
    process = Registry(config, telemetry)
    channel = open_channel(await process.start())
    try:
        yield process, RegistryClient(channel)
    finally:
        await channel.close()
        await process.stop()
        telemetry.shutdown()


class Member:
    """A replica's side: its block set and its registration."""

    def __init__(self, client: RegistryClient, replica: Replica) -> None:
        self.client = client
        self.replica = replica
        self.keys: set[bytes] = set()
        self.seq = 0
        self.epoch = 0

    @property
    def peer(self) -> Peer:
        return self.replica.peer

    async def register(self, ttl_s: float = TTL_S):
        self.epoch, identity = await self.client.register(self.replica, ttl_s=ttl_s, timeout_s=CALL_S)
        self.seq = 0
        return identity

    async def beat(self, *, ttl_s: float = TTL_S, **state):
        return await self.client.heartbeat(
            self.peer, model=MODEL, epoch=self.epoch, state=ReplicaState(**state), ttl_s=ttl_s, timeout_s=CALL_S
        )

    def batch(self, added=(), removed=(), *, cleared=False) -> BlockBatch:
        """Change the own set and return the batch that tells it."""
        self.keys = ((set() if cleared else self.keys) - set(removed)) | set(added)
        self.seq += 1
        return BlockBatch(
            seq=self.seq,
            added=tuple(added),
            removed=tuple(removed),
            cleared=cleared,
            count=len(self.keys),
            xor=xor_keys(self.keys),
        )

    async def send(self, batch: BlockBatch):
        return await self.client.publish(self.peer, model=MODEL, epoch=self.epoch, batch=batch, timeout_s=CALL_S)

    async def publish(self, added=(), removed=(), *, cleared=False):
        return await self.send(self.batch(added, removed, cleared=cleared))

    async def snapshot(self) -> bool:
        return await self.client.put_snapshot(
            self.peer, model=MODEL, epoch=self.epoch, seq=self.seq, keys=list(self.keys), timeout_s=CALL_S
        )

    async def deregister(self) -> None:
        await self.client.deregister(self.peer, model=MODEL, timeout_s=CALL_S)


@dataclass
class Mirror:
    """What a watcher makes of the events; every batch's seq, count and XOR must fit."""

    replicas: dict[str, Replica] = field(default_factory=dict)
    blocks: dict[str, set[bytes]] = field(default_factory=dict)
    states: dict[str, ReplicaState] = field(default_factory=dict)
    gone: list[tuple[str, str, str]] = field(default_factory=list)
    position: str = ""
    caught_up: int = 0
    resets: int = 0

    def apply(self, watched: Watched) -> None:
        self.position = watched.position
        match watched.event:
            case Reset():
                self.resets += 1
                self.replicas, self.blocks, self.states = {}, {}, {}
            case CaughtUp():
                self.caught_up += 1
            case ReplicaSeen(replica):
                self.replicas[replica.peer.replica_id] = replica
                self.blocks[replica.peer.replica_id] = set()
            case ReplicaGone(peer, reason):
                self.gone.append((peer.replica_id, peer.incarnation, reason))
                self.replicas.pop(peer.replica_id)
                self.blocks.pop(peer.replica_id)
                self.states.pop(peer.replica_id, None)
            case ReplicaBeat(peer, state):
                self.states[peer.replica_id] = state
            case BlocksSeen(peer, batch):
                self._apply_batch(peer, batch)

    def _apply_batch(self, peer: Peer, batch: BlockBatch) -> None:
        held = self.blocks[peer.replica_id]
        if batch.cleared:
            held.clear()
        assert held >= set(batch.removed)
        assert not held & set(batch.added)
        held -= set(batch.removed)
        held |= set(batch.added)
        if batch.xor:
            assert (len(held), xor_keys(held)) == (batch.count, batch.xor)

    @asynccontextmanager
    async def following(self, client: RegistryClient, model: str = MODEL) -> AsyncIterator["Mirror"]:
        """Follow while inside, from where it was; gives itself once caught up."""
        before = self.caught_up
        task = asyncio.create_task(self._follow(client, model))
        try:
            await until_done(lambda: task.done() or self.caught_up > before, "caught up")
            yield self
        finally:
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(result, asyncio.CancelledError):
                raise result

    async def _follow(self, client: RegistryClient, model: str) -> None:
        async with aclosing(client.watch(model, self.position)) as events:
            async for watched in events:
                self.apply(watched)

    def holds(self, *members: Member) -> bool:
        """Whether it shows exactly these members and their sets."""
        return self.blocks == {member.peer.replica_id: member.keys for member in members}


WAIT_S = 20.0
"""Longest wait for a condition; what is waited for takes one second at most."""


async def until_done(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition and print how long it took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while not condition():
        assert loop.time() - began_s < WAIT_S, f"never happened: {what}"
        await asyncio.sleep(0.005)
    print(f"{what}: {loop.time() - began_s:.3f} s")
