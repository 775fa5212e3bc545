"""The blocking client: the asyncio client on an event loop of its own, in one thread."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from kvrelay.client.aio import DEFAULT_ADDRESS, AsyncClient
from kvrelay.client.requests import ChatPrompt, RawPrompt
from kvrelay.client.stream import AnswerStream
from kvrelay.client.values import Answer, FleetStatus, ModelInfo, Options, Part, Tokenized
from kvrelay.config import CONTROL_DEADLINE_S, REQUEST_DEADLINE_S

CLOSE_TIMEOUT_S = 5.0
"""Longest wait for the event loop's thread to end; a daemon, so a stuck one does not hold up the process."""

T = TypeVar("T")


class Client:
    """As `AsyncClient`, blocking. May be used from several threads; close it, or use it as a context manager."""

    def __init__(
        self, address: str | Sequence[str] = DEFAULT_ADDRESS, *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> None:
        self._client = AsyncClient(address, deadline_s=deadline_s)
        self._loop = _LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and close all connections; may be called again."""
        if self._loop.running:
            self._loop.run(self._client.close())
            self._loop.stop()

    def chat(self, prompt: ChatPrompt, **options: Unpack[Options]) -> Answer:
        """Return the whole answer to a chat."""
        return self._loop.run(self._client.chat(prompt, **options))

    def stream_chat(self, prompt: ChatPrompt, **options: Unpack[Options]) -> "SyncAnswerStream":
        """Return the answer to a chat, part by part."""
        return SyncAnswerStream(self._client.stream_chat(prompt, **options), self._loop)

    def generate(self, prompt: RawPrompt, **options: Unpack[Options]) -> Answer:
        """Return the whole continuation of a text or of token ids."""
        return self._loop.run(self._client.generate(prompt, **options))

    def stream_generate(self, prompt: RawPrompt, **options: Unpack[Options]) -> "SyncAnswerStream":
        """Return the continuation of a text or of token ids, part by part."""
        return SyncAnswerStream(self._client.stream_generate(prompt, **options), self._loop)

    def status(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> FleetStatus:
        """Return what the router knows of the fleet."""
        return self._loop.run(self._client.status(deadline_s=deadline_s))

    def models(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> tuple[ModelInfo, ...]:
        """Return the models that are served."""
        return self._loop.run(self._client.models(deadline_s=deadline_s))

    def tokenize(
        self, prompt: ChatPrompt, *, raw: bool = False, model: str = "", deadline_s: float = CONTROL_DEADLINE_S
    ) -> Tokenized:
        """Return the token ids of a chat, or of a text taken as it is (`raw`)."""
        return self._loop.run(self._client.tokenize(prompt, raw=raw, model=model, deadline_s=deadline_s))


class SyncAnswerStream:
    """Parts of one answer: leaving its loop or its `with` block early ends the request."""

    def __init__(self, stream: AnswerStream, loop: "_LoopThread") -> None:
        self._stream = stream
        self._loop = loop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Part]:
        try:
            while (part := self._loop.run(_next(self._stream))) is not None:
                yield part
        finally:
            self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            Unavailable: the last part has not been read.
        """
        return self._stream.answer

    def close(self) -> None:
        """End the request now, wherever it is; does nothing after its end."""
        if self._loop.running:
            self._loop.run(self._stream.aclose())


async def _next(stream: AnswerStream) -> Part | None:
    return await anext(stream, None)


class _LoopThread:
    """An event loop that runs in a daemon thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvrelay-client", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()  # work is handed over before `stop` winds it up, or refused
        self.running = True

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end; interrupting the wait (Ctrl-C) cancels it. What bounds the wait is in `work`."""
        with self._lock:
            if not self.running:
                work.close()
                raise RuntimeError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what other threads still wait for, then end the loop and its thread."""
        with self._lock:
            if not self.running:
                return
            self.running = False
            winding_up = asyncio.run_coroutine_threadsafe(_wind_up(), self._loop)
        with contextlib.suppress(TimeoutError):
            winding_up.result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _wind_up() -> None:
    """Cancel every other task of this loop and see them end: else their waiters would wait for ever."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
