"""Client connections: every call carries trace and request id, and a deadline.

The channel is wrapped instead of intercepted: an interceptor costs a task a call, and a call without deadline should
fail where it is written, not inside a task.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio

from kvrelay.errors import PeerLost
from kvrelay.rpc import options
from kvrelay.rpc.context import outgoing_headers

ENDLESS_METHODS: Final = frozenset({"/kvrelay.v1.KvRegistry/Watch", "/grpc.health.v1.Health/Watch"})
"""Streams that follow something for ever; keepalive ends them when the peer is lost."""

CHANNELS_MAX: Final = 1024
"""Channels kept by one process: more than a fleet has replicas, far below a process's file descriptors."""

RETIRE_TIMEOUT_S: Final = 600.0
"""Longest time that calls on a dropped channel may go on: the longest default deadline of a request."""


class DeadlineMissingError(RuntimeError):
    """A call was written without a timeout: a bug of the caller."""


class PeerChannel(grpc.aio.Channel):
    """A channel to one address. A call on a closed one raises PeerLost.

    Attributes:
        address: host:port.
        running: calls that have not ended.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.running = 0
        self._closed = False
        self._inner = grpc.aio.insecure_channel(address, options=options.CHANNEL)
        self._idle = asyncio.Event()
        self._idle.set()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the callable of a method."""
        return self._callable(method, self._inner.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the callable of a method."""
        return self._callable(method, self._inner.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the callable of a method."""
        return self._callable(method, self._inner.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the callable of a method."""
        return self._callable(method, self._inner.stream_stream(method, *args, **kwargs))

    def _callable(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        needs_deadline = method not in ENDLESS_METHODS

        def call(*args: Any, timeout: float | None = None, metadata: Any = None, **kwargs: Any) -> Any:
            if timeout is None and needs_deadline:
                raise DeadlineMissingError(f"{method} called without timeout: every call needs a deadline")
            if self._closed:
                raise PeerLost(f"the channel to {self.address} was closed; get a new one")
            headers = [*(metadata or ()), *outgoing_headers()]
            made = inner(*args, timeout=timeout, metadata=headers, **kwargs)
            self._begun()
            made.add_done_callback(self._ended)
            return made

        return call

    def _begun(self) -> None:
        self.running += 1
        self._idle.clear()

    def _ended(self, _call: object) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def close(self, grace: float | None = None) -> None:
        """Close once running calls have ended, after `grace` seconds at the latest; None: at once."""
        if grace:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._idle.wait()
        self._closed = True
        await self._inner.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 - as grpc has it
        """Return the state of the connection."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state of the connection differs."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the connection stands."""
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()


def open_channel(address: str) -> PeerChannel:
    """Open a channel to "host:port"; connects at the first call. Call inside the running loop."""
    return PeerChannel(address)


class Channels:
    """One channel an address, opened at first use; the least recently used one gives way over the bound.

    Calls that run on a channel that is dropped or gave way end on their own.
    """

    def __init__(self, *, most: int = CHANNELS_MAX) -> None:
        self._most = most
        self._open: OrderedDict[str, PeerChannel] = OrderedDict()
        self._retiring: dict[asyncio.Task[None], PeerChannel] = {}

    def get(self, address: str) -> PeerChannel:
        """Return the channel to "host:port"."""
        channel = self._open.get(address)
        if channel is None:
            channel = self._open[address] = open_channel(address)
            if len(self._open) > self._most:
                self._retire(self._open.pop(self._least_wanted()))
        self._open.move_to_end(address)
        return channel

    async def drop(self, address: str) -> None:
        """Forget the channel to an address, as after its peer was replaced; the next `get` opens a new one."""
        channel = self._open.pop(address, None)
        if channel is not None:
            self._retire(channel)

    async def close(self) -> None:
        """Close all channels at once; running calls are cancelled."""
        channels = [*self._open.values(), *self._retiring.values()]
        tasks = list(self._retiring)
        self._open.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()

    def _least_wanted(self) -> str:
        idle = (address for address, channel in self._open.items() if not channel.running)
        return next(idle, next(iter(self._open)))

    def _retire(self, channel: PeerChannel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(RETIRE_TIMEOUT_S))
        self._retiring[task] = channel
        task.add_done_callback(lambda done: self._retiring.pop(done, None))
