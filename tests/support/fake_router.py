"""A router of which only the text is false: real servicer, real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from support.rpc import serving

from kvrelay.types import pack_ids
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Answers with the words of its script; remembers what it was asked and what became of it."""

    def __init__(self, words=("The ", "sky"), *, error=None, endless=False, cut=False):
        self.words = words
        self.error = error
        self.endless = endless
        self.cut = cut
        self.asked = []
        self.deadlines_s = []
        self.ended = []

    async def Generate(self, request, context) -> AsyncIterator[router_pb2.GenerateResponse]:  # noqa: N802 - gRPC's name
        self.asked.append(request)
        self.deadlines_s.append(context.time_remaining())
        try:
            async for response in self._answer():
                yield response
            self.ended.append("finished")
        except (asyncio.CancelledError, GeneratorExit):  # cancelled while it waits, or while a part is being sent
            self.ended.append("cancelled")
            raise

    async def _answer(self):
        if self.error is not None:
            raise self.error
        decode = common_pb2.Peer(replica_id="decode-0", incarnation="i", address="h:1")
        decision = router_pb2.Decision(request_id="r1", model="m", decode=decode, reason="cold", seed=7)
        yield router_pb2.GenerateResponse(decision=decision)
        for position, word in enumerate(self.words):
            span = common_pb2.TokenSpan(position=position, ids=pack_ids([position]))
            yield router_pb2.GenerateResponse(delta=router_pb2.Delta(text=word, tokens=span))
        if self.endless:
            await asyncio.Event().wait()
        if not self.cut:
            usage = common_pb2.Usage(prompt_tokens=3, output_tokens=len(self.words))
            finish = router_pb2.Finish(reason=common_pb2.FINISH_REASON_STOP, usage=usage, attempts=1, ttft_s=0.25)
            yield router_pb2.GenerateResponse(finish=finish)

    async def GetStatus(self, request, context):  # noqa: ARG002, N802 - gRPC's names
        replica = router_pb2.ReplicaStatus(
            peer=common_pb2.Peer(replica_id="prefill-0"), role=common_pb2.ROLE_PREFILL, state="ready", pages_total=9
        )
        return router_pb2.GetStatusResponse(state="ready", policy="random", block_tokens=32, replicas=[replica])

    async def ListModels(self, request, context):  # noqa: ARG002, N802 - gRPC's names
        return router_pb2.ListModelsResponse(models=[router_pb2.Model(model="m", context_tokens=8192)])

    async def Tokenize(self, request, context):  # noqa: ARG002, N802 - gRPC's names
        text = request.text or request.chat.messages[0].content
        return router_pb2.TokenizeResponse(prompt_ids=pack_ids(list(text.encode())), block_keys=bytes(32))


@contextlib.asynccontextmanager
async def routing(router):
    async with serving(lambda server: router_pb2_grpc.add_RouterServicer_to_server(router, server.grpc)) as (
        _,
        channel,
    ):
        yield channel.address
