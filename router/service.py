"""`Router`: what clients talk to."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from kvrelay.errors import Unavailable
from kvrelay.rpc import router_convert as convert
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import router_pb2 as pb
from kvrelay.v1.router_pb2_grpc import RouterServicer, add_RouterServicer_to_server
from router.core import RouterCore

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE = pb.DESCRIPTOR.services_by_name["Router"].full_name


class RouterService(RouterServicer):
    """Turns calls into requests and their parts into messages."""

    def __init__(self, *, request_deadline_s: float) -> None:
        self.core: RouterCore | None = None
        """Set once the model's text side is loaded."""
        self._request_deadline_s = request_deadline_s

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on a server that has not started yet."""
        add_RouterServicer_to_server(self, server)

    async def Generate(  # noqa: D102, N802 - as in the proto
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        deadline = Deadline.of(context, self._request_deadline_s)
        async with aclosing(self._ready().generate(convert.ask_from_pb(request), deadline)) as parts:
            async for part in parts:
                yield convert.part_to_pb(part)

    async def ListModels(  # noqa: D102, N802 - as in the proto
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        del request, context
        return pb.ListModelsResponse(models=[convert.model_to_pb(model) for model in self._ready().models()])

    async def GetStatus(  # noqa: D102, N802 - as in the proto
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        del request, context
        return convert.status_to_pb(self._ready().status())

    async def Tokenize(  # noqa: D102, N802 - as in the proto
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        del context
        return convert.tokenized_to_pb(await self._ready().tokenize(request.model, convert.prompt_from_pb(request)))

    def _ready(self) -> RouterCore:
        if self.core is None:
            raise Unavailable("this router is still loading its model's tokenizer; try again in a moment")
        return self.core
