"""Brings a job's prefix in from another replica when that is predicted to be faster than computing it."""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from kvrelay.engine.protocol import AttachLease, Held, LeaseGrant, Pulled, PullFailed, PullStats, ReadLocally, Verdict
from kvrelay.errors import DeadlineExceeded, KvrelayError, PeerLost
from kvrelay.kv.load_times import LoadTimes, Source
from kvrelay.replica.bridge import EngineBridge
from kvrelay.replica.channel import JobChannel
from kvrelay.replica.peers import CONFIRM_TIMEOUT_S, UNCONFIRMED, Peers
from kvrelay.rpc.deadline import Deadline
from kvrelay.telemetry import Telemetry
from kvrelay.types import KEY_BYTES, Holder

PATIENCE_SHARE: Final = 2.0
"""A load is given up once it has taken this many times as long as computing would have."""

PATIENCE_MIN_S: Final = 2.0
PATIENCE_MAX_S: Final = 10.0
"""Bounds of that: two engines may each be busy with a step, and a client does not wait for ever for what can be
computed."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load that could be made.

    Attributes:
        holder: who holds the prefix.
        block_keys: of the prompt.
        held_tokens: tokens that are here already.
        bytes: KV to move.
        load_s: predicted time to load it, s.
        compute_s: predicted time to compute it here instead, s.
    """

    holder: Holder
    block_keys: bytes
    held_tokens: int
    bytes: int
    load_s: float
    compute_s: float

    @property
    def source(self) -> Source:
        """Where the prefix lies."""
        return _source(self.holder)

    @property
    def pays(self) -> bool:
        """Loading is predicted to be faster."""
        return self.load_s < self.compute_s


class LoadFailedError(Exception):
    """A load came to nothing; `reason` is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class JobFailedError(Exception):
    """The job itself failed meanwhile; `error` says why."""

    def __init__(self, error: KvrelayError) -> None:
        super().__init__(error.message)
        self.error = error


class PrefixPull:
    """Loads prefixes for jobs that wait for one; whatever fails, the job computes instead."""

    def __init__(self, bridge: EngineBridge, peers: Peers, telemetry: Telemetry, *, lease_ttl_s: float) -> None:
        self.times = LoadTimes(clock=time.monotonic)
        self._bridge = bridge
        self._peers = peers
        self._telemetry = telemetry
        self._lease_ttl_s = lease_ttl_s
        self._layout = bridge.started.agent.layout

    def tokens(self, holder: Holder | None) -> int:
        """Return how many tokens of a prompt the holder has, as the engine is to be told; 0 when it is nobody else."""
        if holder is None or holder.peer.replica_id == self._peers.me.replica_id:
            return 0
        return holder.blocks * self._layout.block_tokens

    async def bring(
        self, channel: JobChannel, held: Held, holder: Holder | None, block_keys: bytes, deadline: Deadline
    ) -> PullStats | None:
        """Load what the holder has beyond `held`, or have the job compute it; return what was moved.

        Raises:
            KvrelayError: the job itself failed, or the engine takes no commands.
        """
        if holder is None or held.prefix_s is None:
            return None
        load = self._weigh(held, held.prefix_s, holder, block_keys)
        if not load.pays:
            self._bridge.send(ReadLocally(job_id=channel.job_id))
            self._telemetry.metrics.prefix_computed(tier=holder.tier)
            return None
        patience_s = min(max(load.compute_s * PATIENCE_SHARE, PATIENCE_MIN_S), PATIENCE_MAX_S)
        try:
            return await self._load(channel, load, deadline.sooner(patience_s))
        except LoadFailedError as failure:
            deadline.check("loading the prompt's prefix")
            self._bridge.send(ReadLocally(job_id=channel.job_id))
            self._telemetry.metrics.prefix_failed(tier=holder.tier, reason=failure.reason)
            self._telemetry.logger.info("prefix_failed", peer=holder.peer.replica_id, reason=failure.reason)
            return None

    def _weigh(self, held: Held, compute_s: float, holder: Holder, block_keys: bytes) -> Load:
        blocks = min(holder.blocks, len(block_keys) // KEY_BYTES)
        pages = max(blocks * self._layout.block_tokens - held.tokens, 0) // self._layout.page_tokens
        size_bytes = pages * self._layout.page_bytes
        load_s = self.times.predict(_source(holder), size_bytes)
        return Load(holder, block_keys, held.tokens, size_bytes, load_s, compute_s)

    # ------------------------------------------------------------ loading

    async def _load(self, channel: JobChannel, load: Load, deadline: Deadline) -> PullStats:
        peer = load.holder.peer
        # The first READ from a peer makes the connection, which no later one does: it tells nothing of those.
        first = not self._peers.knows(peer)
        lease: LeaseGrant | None = None
        started_s = time.monotonic()
        over = False
        try:
            async with asyncio.timeout(deadline.left_s()):
                source = await self._peers.agent(peer, deadline)
                lease = await self._lease(load, deadline)
                attach = AttachLease(job_id=channel.job_id, lease=lease, source=source)
                self._bridge.send(attach)
                pulled = await _pulled(channel, lease.lease_id)
                valid, reason = await self._peers.confirm(peer, lease.lease_id, pulled.pages, deadline)
            over = reason != UNCONFIRMED
        except JobFailedError as failed:
            raise failed.error from None
        except (TimeoutError, DeadlineExceeded):
            self.times.learn(load.source, load.bytes, time.monotonic() - started_s)
            raise LoadFailedError("timeout") from None
        except KvrelayError as error:
            if isinstance(error, PeerLost):
                await self._peers.lost(peer)
            raise LoadFailedError(type(error).__name__) from error
        finally:
            if lease is not None and not over:
                self._peers.release(peer, lease.lease_id)
        self._bridge.send(Verdict(job_id=channel.job_id, lease_id=lease.lease_id, valid=valid))
        if not valid:
            raise LoadFailedError(reason or "declined")
        self._note(load, pulled.stats, elapsed_s=time.monotonic() - started_s, first=first)
        return pulled.stats

    async def _lease(self, load: Load, deadline: Deadline) -> LeaseGrant:
        return await self._peers.lease_prefix(
            load.holder.peer,
            load.block_keys,
            skip_blocks=load.held_tokens // self._layout.block_tokens,
            ttl_s=min(self._lease_ttl_s, PATIENCE_MAX_S + CONFIRM_TIMEOUT_S),
            deadline=deadline,
        )

    def _note(self, load: Load, stats: PullStats, *, elapsed_s: float, first: bool) -> None:
        now_s = time.monotonic()
        self._telemetry.record_span(
            "kv.load",
            start_s=now_s - elapsed_s,
            end_s=now_s,
            attributes={
                "kvrelay.peer": load.holder.peer.replica_id,
                "kvrelay.tier": load.holder.tier,
                "kvrelay.pull.bytes": stats.bytes,
                "kvrelay.pull.tokens": stats.tokens,
                "kvrelay.pull.descriptors": stats.descriptors,
                "kvrelay.pull.transport": stats.transport,
                "kvrelay.load.predicted_s": load.load_s,
                "kvrelay.load.compute_s": load.compute_s,
            },
        )
        expected_s = self.times.predict(load.source, stats.bytes)
        self._telemetry.metrics.prefix_loaded(tier=load.holder.tier, expected_s=expected_s, elapsed_s=elapsed_s)
        if not first:
            self.times.learn(load.source, stats.bytes, elapsed_s)


def _source(holder: Holder) -> Source:
    return holder.peer.replica_id, holder.tier


async def _pulled(channel: JobChannel, lease_id: str) -> Pulled:
    """Wait for the end of a pull; the caller bounds the time.

    Raises:
        LoadFailedError: the pull failed.
        JobFailedError: the job did.
    """
    while True:
        try:
            event = await channel.get(timeout_s=PATIENCE_MAX_S)
        except KvrelayError as error:
            raise JobFailedError(error) from error
        match event:
            case Pulled() if event.lease_id == lease_id:
                return event
            case PullFailed() if event.lease_id == lease_id:
                raise LoadFailedError(event.reason)
            case _:
                pass
