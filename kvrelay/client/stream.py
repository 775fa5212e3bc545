"""An answer as it arrives."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from kvrelay.client import wire
from kvrelay.client.answer import AnswerBuilder
from kvrelay.client.routers import Routers
from kvrelay.client.values import Answer, Part
from kvrelay.errors import Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.errors import from_rpc_error
from kvrelay.v1 import router_pb2

if TYPE_CHECKING:
    Call = grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]


class AnswerStream:
    """Parts of one answer: an async iterator, and an async context manager that ends the request when left early.

    The request is sent when the first part is asked for. Iterating raises `kvrelay.errors.KvrelayError`.
    """

    def __init__(self, routers: Routers, request: router_pb2.GenerateRequest, deadline_s: float) -> None:
        self._routers = routers
        self._request = request
        self._deadline_s = deadline_s
        self._deadline: Deadline | None = None
        self._untried = len(routers)
        self._address = ""
        self._call: Call | None = None
        self._builder = AnswerBuilder()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Part:
        while not self._closed:
            part = await self._next()
            if part is not None:
                self._builder.add(part)
                return part
        raise StopAsyncIteration

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            Unavailable: the last part has not been read.
        """
        return self._builder.answer()

    async def aclose(self) -> None:
        """End the request now, wherever it is; does nothing after its end."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def _next(self) -> Part | None:
        """Read one part; None for one that says nothing to this client, and at the end."""
        try:
            response = await self._open().read()
        except grpc.aio.AioRpcError as error:
            self._lost(error)
            return None
        except BaseException:
            await self.aclose()
            raise
        if isinstance(response, router_pb2.GenerateResponse):
            return wire.part_from_pb(response)
        self._end()
        return None

    def _open(self) -> "Call":
        if self._call is None:
            self._deadline = self._deadline or Deadline.after(self._deadline_s)
            self._untried -= 1
            self._address = self._routers.current
            self._call = self._routers.stub().Generate(self._request, timeout=self._deadline.left_s())
        return self._call

    def _lost(self, error: grpc.aio.AioRpcError) -> None:
        """Go on with the next router if nothing has arrived yet, else raise."""
        self._call = None
        known = from_rpc_error(error)
        if isinstance(known, Unavailable):
            known = self._routers.lost(known, self._address)
            if self._untried and not self._builder.begun:
                return
        self._closed = True
        raise known from None

    def _end(self) -> None:
        self._closed = True
        self._call = None
        if not self._builder.finished:
            raise Unavailable("the router ended the answer before its finish; ask again")
