"""Decode replicas that write by a formula and fail as they are told, over real gRPC, and routers in front of them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from support import registry as fleet_registry
from support.registry import LAYOUT, MODEL, TTL_S, Member, until_done
from support.rpc import serving

from kvrelay.client import AsyncClient
from kvrelay.config import RouterConfig
from kvrelay.errors import KvrelayError
from kvrelay.kv.keys import make_identity
from kvrelay.model.files import resolve
from kvrelay.model.text import load_text
from kvrelay.rpc import convert
from kvrelay.rpc.convert import TokenSpan
from kvrelay.rpc.registry_client import RegistryClient
from kvrelay.telemetry import Telemetry
from kvrelay.types import FinishReason, ModelIdentity, Peer, Replica, Role, Usage, unpack_ids
from kvrelay.v1 import decode_pb2 as pb
from kvrelay.v1.decode_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from router.worker import Router

MOCK = load_text(resolve("mock"))
CONTEXT_TOKENS = 4096
IDENTITY = make_identity(
    model=MODEL,
    model_fingerprint="weights",
    tokenizer_fingerprint=MOCK.fingerprint,
    block_tokens=LAYOUT.block_tokens,
    context_tokens=CONTEXT_TOKENS,
)


def token_at(position: int) -> int:
    """The token that every replica writes at a position: a letter of the alphabet, so that order shows."""
    return MOCK.tokenizer.encode(chr(ord("a") + position % 26)).ids[0]


def text_from(position: int, tokens: int) -> str:
    """The text of such tokens."""
    return "".join(chr(ord("a") + (position + at) % 26) for at in range(tokens))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one attempt goes.

    Attributes:
        fail_after: tokens after which `error` is raised (None: never).
        hang_after: tokens after which nothing comes any more.
        skip_after: tokens after which one is left out.
        span: tokens in a message.
        repeat: every message tells the token before it again.
        attempt: attempt number told, if not the asked one.
        legs: prefill legs told first.
        end_early: the stream ends without its last message.
    """

    fail_after: int | None = None
    error: KvrelayError | None = None
    hang_after: int | None = None
    skip_after: int | None = None
    span: int = 1
    repeat: bool = False
    attempt: int | None = None
    legs: tuple[pb.PrefillLeg, ...] = ()
    end_early: bool = False


class FakeDecode(DecodeServicer):
    """Serves attempts by its plans, then faultlessly."""

    def __init__(self) -> None:
        self.plans: deque[Plan] = deque()
        self.requests: list[pb.DecodeGenerateRequest] = []
        self.running = 0
        self.held_tokens = 0

    async def Generate(  # noqa: N802 - as in the proto
        self, request: pb.DecodeGenerateRequest, context: Any
    ) -> AsyncIterator[pb.DecodeGenerateResponse]:
        del context
        self.requests.append(request)
        self.running += 1
        try:
            plan = self.plans.popleft() if self.plans else Plan()
            async for response in self._answer(request, plan):
                yield response
        finally:
            self.running -= 1

    async def _answer(self, request: pb.DecodeGenerateRequest, plan: Plan) -> AsyncIterator[pb.DecodeGenerateResponse]:
        if plan.fail_after == 0 and plan.error:
            raise plan.error
        yield pb.DecodeGenerateResponse(accepted=pb.Accepted(held_tokens=self.held_tokens))
        for leg in plan.legs:
            yield pb.DecodeGenerateResponse(prefill_leg=leg)
        prompt, before = len(unpack_ids(request.prompt_ids)), len(unpack_ids(request.output_ids))
        written = before
        while written < request.sampling.max_tokens:
            if plan.fail_after is not None and written - before >= plan.fail_after:
                if plan.error is None:
                    return
                raise plan.error
            if plan.hang_after is not None and written - before >= plan.hang_after:
                await asyncio.Event().wait()
            if plan.skip_after is not None and written - before == plan.skip_after:
                written += 1
            length = min(plan.span, request.sampling.max_tokens - written)
            start = prompt + written - (1 if plan.repeat and written > before else 0)
            attempt = request.attempt if plan.attempt is None else plan.attempt
            ids = tuple(token_at(at) for at in range(start, prompt + written + length))
            span = TokenSpan(attempt=attempt, position=start, ids=ids)
            yield pb.DecodeGenerateResponse(tokens=convert.span_to_pb(span))
            written += length
        if not plan.end_early:
            usage = Usage(prompt_tokens=prompt, cached_tokens=self.held_tokens, output_tokens=written)
            yield pb.DecodeGenerateResponse(
                finished=pb.Finished(
                    reason=convert.finish_reason_to_pb(FinishReason.LENGTH), usage=convert.usage_to_pb(usage)
                )
            )


@dataclass
class FakeReplica:
    """A replica in the directory, with its decode service where it has one."""

    member: Member
    decode: FakeDecode
    kill: Callable[[], Any] = field(repr=False)

    @property
    def peer(self) -> Peer:
        return self.member.peer


class FakeFleet:
    """A registry, replicas, routers; everything ends with the block."""

    def __init__(self, client: RegistryClient, registry_address: str, stack: AsyncExitStack) -> None:
        self.client = client
        self._registry_address = registry_address
        self._stack = stack

    async def replica(
        self,
        replica_id: str,
        role: Role = Role.DECODE,
        *,
        incarnation: str = "i1",
        identity: ModelIdentity = IDENTITY,
        ttl_s: float = TTL_S,
        **state: Any,
    ) -> FakeReplica:
        """Start a replica and enter it."""
        decode = FakeDecode()
        own = await self._stack.enter_async_context(AsyncExitStack())
        server, _ = await own.enter_async_context(
            serving(lambda server: add_DecodeServicer_to_server(decode, server.grpc))
        )
        entry = Replica(
            peer=Peer(replica_id, incarnation, server.address),
            role=role,
            identity=identity,
            layout=LAYOUT,
            pages=256,
            max_sequences=8,
        )
        member = Member(self.client, entry)
        await member.register(ttl_s)
        await member.beat(ttl_s=ttl_s, **state)
        return FakeReplica(member, decode, own.aclose)

    async def router(
        self, *, seed: int = 1, wait: bool = True, told: Mapping[str, Any] | None = None, **config: Any
    ) -> tuple[Router, AsyncClient]:
        """Start a router, wait until it is ready, and return it with a client of it; `told` is for its telemetry."""
        given = RouterConfig(port=0, registry=self._registry_address, model="mock", model_alias=MODEL, **config)
        telemetry = Telemetry.start("router", "test", given, **(told or {}))
        self._stack.callback(telemetry.shutdown)
        router = Router(given, telemetry, rng=Random(seed))
        client = AsyncClient(await router.start())
        self._stack.push_async_callback(router.stop)
        self._stack.push_async_callback(client.close)
        if wait:
            await until_done(router.ready, "the router is ready")
        return router, client


@asynccontextmanager
async def fake_fleet(redis_url: str) -> AsyncIterator[FakeFleet]:
    """A registry over a real store, and what is added to it."""
    async with fleet_registry.registry(redis_url) as (process, client), AsyncExitStack() as stack:
        yield FakeFleet(client, process.server.address, stack)
