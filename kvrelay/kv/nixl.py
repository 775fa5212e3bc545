"""KV transfer over NIXL: a serving agent that others read from, and reading endpoints that come and go.

They are apart so that a reading agent can be destroyed, which is the one proof that a stuck READ will not land, without
taking away what others read here.
"""

import itertools
import time
from collections.abc import Callable
from typing import Final

from kvrelay.engine.protocol import AgentInfo
from kvrelay.engine.runner import KvMemory
from kvrelay.errors import InvalidArgument
from kvrelay.kv.descriptors import check_inside, coalesce
from kvrelay.kv.nixl_agent import Agent
from kvrelay.kv.nixl_endpoint import Endpoint
from kvrelay.kv.nixl_read import NixlRead
from kvrelay.kv.transfer import Read, ReadState
from kvrelay.logs import get_logger

RETIRED_MAX: Final = 8
"""Retired endpoints that may wait for abandoned READs; past it the oldest closes on them. An agent costs two threads
and some twenty file descriptors."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long `close` waits for READs under way: a good part of a drain, no more."""

CLOSE_FORCED_TIMEOUT_S: Final = 2.0
"""How long it then waits for agents to be destroyed, which takes tens of milliseconds."""


class NixlTransfer:
    """One replica's end of the KV network; implements `kvrelay.kv.transfer.Transfer`.

    Args:
        agent_name: name of the serving agent; a new one at every start.
        clock: monotonic seconds.
        close_timeout_s: how long `close` waits for READs under way.
    """

    def __init__(
        self,
        *,
        agent_name: str,
        clock: Callable[[], float] = time.monotonic,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self._name = agent_name
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._log = get_logger("kvrelay.kv").bind(agent=agent_name)
        self._numbers = itertools.count(1)
        self._memory: KvMemory | None = None
        self._server: Agent | None = None
        self._reader: Endpoint | None = None
        self._retired: list[Endpoint] = []

    def register(self, *, base_address: int, pages: int, page_bytes: int, memory: str, device_id: int) -> None:
        """Register the pool's memory; once, before anything else.

        Raises:
            InternalError: NIXL is not installed or refuses the memory.
        """
        assert self._memory is None, "the memory is registered already"
        self._memory = KvMemory(base_address, pages, page_bytes, memory, device_id)
        self._server = Agent(self._name, self._memory)
        self._open_reader()

    def agent(self) -> tuple[str, bytes]:
        """Return the serving agent's name and metadata."""
        assert self._server is not None, "register comes first"
        return self._name, self._server.metadata()

    def read(self, source: AgentInfo, *, remote_pages: list[int], local_pages: list[int]) -> Read:
        """Post a READ of whole pages; never blocks. What goes wrong with the peer turns the Read FAILED.

        Raises:
            InvalidArgument: the lists do not fit each other or the pools, or the pools' pages differ in size.
        """
        assert self._memory is not None, "register comes first"
        if source.layout.page_bytes != self._memory.page_bytes:
            raise InvalidArgument(
                "source.layout.page_bytes", f"{source.layout.page_bytes}, but pages here have {self._memory.page_bytes}"
            )
        runs = coalesce(remote_pages, local_pages)
        check_inside("remote_pages", remote_pages, source.pages)
        check_inside("local_pages", local_pages, self._memory.pages)
        reader = self._usable_reader()
        read = NixlRead(source, runs, reader.name)
        reader.post(read)
        return read

    def abandon(self, read: Read) -> None:
        """Give up on a PENDING read: poll its state still. New reads go through a fresh agent."""
        assert isinstance(read, NixlRead)
        if read.state() is not ReadState.PENDING or read.abandoned_at_s is not None:
            return
        self._log.warning("kv.read_abandoned", peer=read.source.replica_id)
        read.abandoned_at_s = self._clock()
        if self._reader is not None and self._reader.name == read.endpoint_name:
            self._reader.retire()  # any other has retired already

    def forget(self, agent_name: str) -> None:
        """Drop a peer that has gone. Its pending reads turn FAILED as soon as their endpoint has closed."""
        for endpoint in self._endpoints():
            endpoint.forget(agent_name)

    def close(self) -> None:
        """Wait for posted reads up to a bound, then destroy every agent."""
        endpoints = self._endpoints()
        for endpoint in endpoints:
            endpoint.hasten()
        self._join(endpoints, self._close_timeout_s)
        for endpoint in endpoints:
            endpoint.stop()
        if not self._join(endpoints, CLOSE_FORCED_TIMEOUT_S):
            self._log.error("kv.endpoint_stuck")
        self._reader, self._retired = None, []
        if self._server is not None:
            self._server.close()
            self._server = None

    def _usable_reader(self) -> Endpoint:
        if self._reader is not None and self._reader.usable:
            return self._reader
        if self._reader is not None:
            self._retired.append(self._reader)
        self._retired = [endpoint for endpoint in self._retired if not endpoint.closed]
        for endpoint in self._retired[:-RETIRED_MAX]:
            endpoint.hasten()
        return self._open_reader()

    def _open_reader(self) -> Endpoint:
        assert self._memory is not None
        self._reader = Endpoint(f"{self._name}/reader-{next(self._numbers)}", self._memory, self._clock)
        return self._reader

    def _endpoints(self) -> list[Endpoint]:
        return [*self._retired, self._reader] if self._reader is not None else list(self._retired)

    @staticmethod
    def _join(endpoints: list[Endpoint], timeout_s: float) -> bool:
        ends_at_s = time.monotonic() + timeout_s
        return all(endpoint.join(ends_at_s - time.monotonic()) for endpoint in endpoints)
