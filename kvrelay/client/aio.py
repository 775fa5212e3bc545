"""The asyncio client."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc

from kvrelay.client import requests, wire
from kvrelay.client.requests import ChatPrompt, RawPrompt
from kvrelay.client.routers import Routers
from kvrelay.client.stream import AnswerStream
from kvrelay.client.values import Answer, FleetStatus, ModelInfo, Options, Tokenized
from kvrelay.config import CONTROL_DEADLINE_S, REQUEST_DEADLINE_S, ROUTER_PORT
from kvrelay.errors import Unavailable
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.v1 import router_pb2

if TYPE_CHECKING:
    from kvrelay.v1.router_pb2_grpc import RouterAsyncStub

DEFAULT_ADDRESS = f"127.0.0.1:{ROUTER_PORT}"

T = TypeVar("T")


class AsyncClient:
    """Asks a fleet through its routers; one client serves any number of requests at once.

    Text is taken in two ways: `chat` and `stream_chat` render messages (a str is one user message) with the model's
    chat template, `generate` and `stream_generate` take a text or token ids as they are. Keywords are those of
    `Options`. All of them raise `kvrelay.errors.KvrelayError`.

    Args:
        address: host:port of a router, or of several equal ones. Another one is taken when a router is unavailable
            before it has sent anything; an answer that breaks off later is an `Unavailable` error.
        deadline_s: seconds until a whole answer must be there, for requests that do not say.
    """

    def __init__(
        self, address: str | Sequence[str] = DEFAULT_ADDRESS, *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> None:
        self._routers = Routers(address)
        self._deadline_s = deadline_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests and close all connections."""
        await self._routers.close()

    async def chat(self, prompt: ChatPrompt, **options: Unpack[Options]) -> Answer:
        """Return the whole answer to a chat."""
        return await _whole(self.stream_chat(prompt, **options))

    def stream_chat(self, prompt: ChatPrompt, **options: Unpack[Options]) -> AnswerStream:
        """Return the answer to a chat, part by part."""
        deadline_s, rest = self._split(options)
        return AnswerStream(self._routers, requests.chat_request(prompt, rest), deadline_s)

    async def generate(self, prompt: RawPrompt, **options: Unpack[Options]) -> Answer:
        """Return the whole continuation of a text or of token ids."""
        return await _whole(self.stream_generate(prompt, **options))

    def stream_generate(self, prompt: RawPrompt, **options: Unpack[Options]) -> AnswerStream:
        """Return the continuation of a text or of token ids, part by part."""
        deadline_s, rest = self._split(options)
        return AnswerStream(self._routers, requests.raw_request(prompt, rest), deadline_s)

    async def status(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> FleetStatus:
        """Return what the router knows of the fleet."""
        question = router_pb2.GetStatusRequest()
        return wire.status_from_pb(await self._ask(lambda stub: stub.GetStatus(question, timeout=deadline_s)))

    async def models(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> tuple[ModelInfo, ...]:
        """Return the models that are served."""
        question = router_pb2.ListModelsRequest()
        return wire.models_from_pb(await self._ask(lambda stub: stub.ListModels(question, timeout=deadline_s)))

    async def tokenize(
        self, prompt: ChatPrompt, *, raw: bool = False, model: str = "", deadline_s: float = CONTROL_DEADLINE_S
    ) -> Tokenized:
        """Return the token ids of a chat, or of a text taken as it is (`raw`)."""
        question = requests.tokenize_request(prompt, raw=raw, model=model)
        return wire.tokenized_from_pb(await self._ask(lambda stub: stub.Tokenize(question, timeout=deadline_s)))

    def _split(self, options: Options) -> tuple[float, Mapping[str, Any]]:
        rest = {name: value for name, value in options.items() if name != "deadline_s"}
        return options.get("deadline_s", self._deadline_s), rest

    async def _ask(self, call: Callable[["RouterAsyncStub"], Awaitable[T]]) -> T:
        """Ask the routers in turn until one is available; each gets the whole deadline."""
        for left in reversed(range(len(self._routers))):
            address = self._routers.current
            try:
                return await call(self._routers.stub())
            except grpc.aio.AioRpcError as error:
                known = from_rpc_error(error)
                if isinstance(known, Unavailable):
                    known = self._routers.lost(known, address)
                    if left:
                        continue
                raise known from None
        raise AssertionError("there is at least one router")


async def _whole(stream: AnswerStream) -> Answer:
    async with stream:
        async for _ in stream:
            pass
        return stream.answer
