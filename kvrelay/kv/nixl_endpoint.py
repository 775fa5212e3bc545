"""The reading end of the KV network: one NIXL agent, and the one thread that makes every call to it.

READs between processes of one machine are copies made inside the call that posts them, and connecting or destroying an
agent takes milliseconds; so the engine thread only puts READs into a bounded inbox and looks at attributes.

A READ's local pages are safe to use again when NIXL told its final status, or when the agent has been destroyed. In
between, and also when an error leaves open what is still under way, it stays PENDING.
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvrelay.engine.protocol import AgentInfo
from kvrelay.engine.runner import KvMemory
from kvrelay.kv.descriptors import local_descriptors, remote_descriptors
from kvrelay.kv.nixl_agent import Agent, Handle
from kvrelay.kv.nixl_read import NixlRead
from kvrelay.logs import get_logger

INBOX_MAX: Final = 1024
"""READs waiting to be posted. Far over what an engine has under way; past it a READ fails as "busy"."""

PEERS_MAX: Final = 256
"""Peers kept connected; past it the one that was not used for longest, and has nothing under way, is dropped."""

POLL_INTERVAL_S: Final = 0.0005
"""Time between looks at READs under way: little beside the milliseconds that one takes."""

ABANDONED_POLL_INTERVAL_S: Final = 0.05
"""The same when all of them are abandoned: nobody waits for more than their pages."""

IDLE_WAIT_S: Final = 1.0
"""Longest sleep with nothing under way; the inbox wakes the thread before."""

ABANDONED_KEPT_S: Final = 60.0
"""How long a retired endpoint waits for abandoned READs before it closes on them. A stopped owner that resumes after
its reader has closed may be aborted by UCX (over TCP, when its answer finds no connection), so closing is no haste."""


@dataclass(slots=True)
class _UnderWay:
    """A READ that has been posted. With `doom`, an error left open what of it is under way: only closing ends it."""

    handle: Handle
    doom: str = ""


@dataclass(frozen=True, slots=True)
class _Forget:
    agent_name: str


class Endpoint:
    """Reads into one pool's memory. Methods are called from the engine thread and never block, except `join`."""

    def __init__(self, name: str, memory: KvMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._memory = memory
        self._clock = clock
        self._log = get_logger("kvrelay.kv").bind(agent=name)
        self._inbox: queue.Queue[NixlRead | _Forget | None] = queue.Queue(INBOX_MAX)
        self._under_way: dict[NixlRead, _UnderWay] = {}
        self._peers: dict[str, None] = {}  # connected; least recently used first
        self._broken: set[str] = set()  # connected, but a READ found the connection lost
        self._retired = False
        self._kept_s = ABANDONED_KEPT_S
        self._stopped = False
        self._lock = threading.Lock()  # orders `post` with the last look into the inbox
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """True while it takes new READs."""
        return not (self._retired or self._closed)

    @property
    def closed(self) -> bool:
        """True when the agent has been destroyed: nothing lands by it any more."""
        return self._closed and not self._thread.is_alive()

    def post(self, read: NixlRead) -> None:
        """Post a READ soon. It turns FAILED when the endpoint has closed or its inbox is full."""
        with self._lock:
            if self._closed:
                read.fail("closed")
                return
            try:
                self._inbox.put_nowait(read)
            except queue.Full:
                read.fail("busy")

    def forget(self, agent_name: str) -> None:
        """Drop a peer. READs from it that are under way make the endpoint retire, and fail when it closes."""
        self._tell(_Forget(agent_name))

    def retire(self) -> None:
        """Take nothing new; close when all READs have ended, not waiting for abandoned ones beyond a bound."""
        self._retired = True
        self._tell(None)

    def hasten(self) -> None:
        """Retire, and wait for no abandoned READ."""
        self._kept_s = 0.0
        self.retire()

    def stop(self) -> None:
        """Close now, whatever is under way."""
        self._stopped = True
        self.hasten()

    def join(self, timeout_s: float) -> bool:
        """Wait until the endpoint has closed, and tell whether it has."""
        self._thread.join(max(0.0, timeout_s))
        return self.closed

    # ------------------------------------------------------------ the endpoint's thread

    def _tell(self, item: _Forget | None) -> None:
        try:
            self._inbox.put_nowait(item)
        except queue.Full:  # flags are seen all the same; a peer not forgotten now goes when it is the least used
            self._log.warning("kv.inbox_full")

    def _run(self) -> None:
        agent: Agent | None = None
        reason = "closed"
        try:
            agent = Agent(self.name, self._memory)
            while not self._over():
                self._take(agent)
                self._poll(agent)
        except Exception:  # noqa: BLE001 - whatever it is, the reads must learn that the endpoint is gone
            reason = "transport"
            self._log.exception("kv.endpoint_failed")
        finally:
            self._close(agent, reason)

    def _over(self) -> bool:
        if self._stopped:
            return True
        if not (self._retired and self._inbox.empty()):
            return False
        patient_until_s = self._clock() - self._kept_s
        return all(
            under_way.doom or (read.abandoned_at_s is not None and read.abandoned_at_s <= patient_until_s)
            for read, under_way in self._under_way.items()
        )

    def _take(self, agent: Agent) -> None:
        try:
            item = self._inbox.get(timeout=self._wait_s())
        except queue.Empty:
            return
        if isinstance(item, NixlRead):
            self._start(agent, item)
        elif isinstance(item, _Forget):
            self._drop_peer(agent, item.agent_name)

    def _wait_s(self) -> float:
        if not self._under_way:
            return IDLE_WAIT_S
        if all(read.abandoned_at_s is not None for read in self._under_way):
            return ABANDONED_POLL_INTERVAL_S
        return POLL_INTERVAL_S

    def _start(self, agent: Agent, read: NixlRead) -> None:
        if read.abandoned_at_s is not None:
            read.fail("abandoned")
            return
        try:
            self._connect(agent, read.source)
            handle = self._prepare(agent, read)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base; nothing is under way yet
            if read.source.agent_name in self._peers:
                self._broken.add(read.source.agent_name)
            self._fail(read, "unreachable", error)
            return
        self._under_way[read] = _UnderWay(handle)
        self._look(agent, read, agent.post)

    def _connect(self, agent: Agent, source: AgentInfo) -> None:
        name = source.agent_name
        if name in self._broken:
            if any(read.source.agent_name == name for read in self._under_way):
                raise ConnectionError("the connection is lost and its other reads have not ended yet")
            self._disconnect(agent, name)
        if name not in self._peers:
            self._make_room(agent)
            told = agent.connect(source.agent_metadata)
            if told != name:
                agent.disconnect(told)
                raise ConnectionError(f"the metadata is that of agent {told}")
        self._peers.pop(name, None)
        self._peers[name] = None

    def _prepare(self, agent: Agent, read: NixlRead) -> Handle:
        source = read.source
        remote = KvMemory(source.base_address, source.pages, source.layout.page_bytes, source.memory, source.device_id)
        return agent.prepare(
            source.agent_name,
            local_descriptors(self._memory, read.runs),
            remote_descriptors(remote, read.runs),
            source.memory,
        )

    def _poll(self, agent: Agent) -> None:
        for read, under_way in list(self._under_way.items()):
            if not under_way.doom:
                self._look(agent, read, agent.done)

    def _look(self, agent: Agent, read: NixlRead, done: Callable[[Handle], bool]) -> None:
        under_way = self._under_way[read]
        try:
            if not done(under_way.handle):
                return
            stats = agent.stats(under_way.handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            self._lost(agent, read, error)
            return
        self._settle(agent, read)
        asked = int(read.runs[:, 2].sum()) * self._memory.page_bytes
        if stats.bytes == asked:
            read.finish(stats)
        else:
            self._fail(read, "short", RuntimeError(f"{stats.bytes} bytes were read, {asked} were asked for"))

    def _lost(self, agent: Agent, read: NixlRead, error: Exception) -> None:
        reason = agent.failure(error)
        if reason == "disconnected":  # UCX ends everything of a lost connection before it says so
            self._broken.add(read.source.agent_name)
            self._settle(agent, read)
            self._fail(read, reason, error)
            return
        self._log.error("kv.read_in_doubt", error=repr(error), peer=read.source.replica_id)
        self._under_way[read].doom = reason
        self._retired = True

    def _settle(self, agent: Agent, read: NixlRead) -> None:
        agent.release(self._under_way.pop(read).handle)

    def _fail(self, read: NixlRead, reason: str, error: Exception) -> None:
        self._log.warning("kv.read_failed", reason=reason, error=repr(error), peer=read.source.replica_id)
        read.fail(reason)

    def _drop_peer(self, agent: Agent, name: str) -> None:
        reads = [read for read in self._under_way if read.source.agent_name == name]
        if not reads:
            self._disconnect(agent, name)
            return
        for read in reads:
            read.abandoned_at_s = -math.inf
        self._retired = True

    def _make_room(self, agent: Agent) -> None:
        if len(self._peers) < PEERS_MAX:
            return
        busy = {read.source.agent_name for read in self._under_way}
        if (unused := next((name for name in self._peers if name not in busy), None)) is not None:
            self._disconnect(agent, unused)

    def _disconnect(self, agent: Agent, name: str) -> None:
        self._broken.discard(name)
        if name in self._peers:
            del self._peers[name]
            agent.disconnect(name)

    def _close(self, agent: Agent | None, reason: str) -> None:
        with self._lock:
            self._closed = True
        waiting = self._drained()
        if agent is not None:
            for under_way in self._under_way.values():
                agent.release(under_way.handle)
            agent.close()
        for read in waiting:
            read.fail(reason)
        for read, under_way in self._under_way.items():
            read.fail(under_way.doom or read.given_up_reason or reason)
        self._under_way.clear()
        if reason != "closed":  # one that ended when asked to is no news
            self._log.info("kv.endpoint_closed", reason=reason)

    def _drained(self) -> list[NixlRead]:
        reads: list[NixlRead] = []
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return reads
            if isinstance(item, NixlRead):
                reads.append(item)
