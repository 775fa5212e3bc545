"""Whole replicas in this process, on the mock engine and real gRPC and NIXL, and calls to them."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from support.rpc import CALL_S, until

import decode_svc.worker
import prefill_svc.worker
from kvrelay.config import ReplicaConfig
from kvrelay.kv.keys import block_keys, root_key
from kvrelay.replica.process import ReplicaProcess
from kvrelay.rpc import convert
from kvrelay.rpc.channel import open_channel
from kvrelay.types import Peer, Sampling, Usage, pack_ids, unpack_ids
from kvrelay.v1 import decode_pb2, prefill_pb2
from kvrelay.v1.decode_pb2_grpc import DecodeStub

BLOCK_TOKENS = 32


def config(role: str, **changes: Any) -> ReplicaConfig:
    values = {"engine": "mock", "model": "mock", "registry": "", "kv_mib": 1, "piece_kib": 0, "role": role}
    return ReplicaConfig(**(values | changes))


@asynccontextmanager
async def replica(role: str, **changes: Any) -> AsyncIterator[ReplicaProcess]:
    """Run a replica that stands alone; it stops with the block."""
    process = compose(config(role, **changes))
    await process.start()
    try:
        yield process
    finally:
        await process.stop()


def compose(given: ReplicaConfig) -> ReplicaProcess:
    process = ReplicaProcess(given)
    if process.role.prefills:
        prefill_svc.worker.register(process)
    if process.role.decodes:
        decode_svc.worker.register(process)
    return process


async def at_rest(*replicas: ReplicaProcess) -> None:
    """Wait until nothing of any request is left."""

    def nothing_left() -> bool:
        return all(
            not each.bridge.jobs
            and not each.bridge.state.running
            and not each.bridge.state.waiting
            and not each.bridge.state.leases
            and not each.bridge.state.pages_quarantined
            and each.bridge.state.pages_free == each.bridge.state.pages_total
            for each in replicas
        )

    await until(nothing_left, "nothing of the requests is left")


def prompt(seed: int, tokens: int) -> list[int]:
    return [1 + (seed * 7919 + index * 31) % 256 for index in range(tokens)]


def keys_of(ids: list[int], process: ReplicaProcess) -> tuple[bytes, bytes]:
    """Return (root key, block keys)."""
    identity = process.identity
    root = root_key(
        model_fingerprint=identity.model_fingerprint,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        block_tokens=identity.block_tokens,
    )
    return root, block_keys(root, pack_ids(ids), identity.block_tokens)


def order(
    process: ReplicaProcess,
    ids: list[int],
    *,
    targets: Iterable[Peer] = (),
    max_tokens: int = 16,
    output: list[int] | None = None,
    **fields: Any,
) -> decode_pb2.DecodeGenerateRequest:
    root, keys = keys_of(ids + (output or []), process)
    sampling = Sampling(max_tokens=max_tokens, seed=1, **fields.pop("sampling", {}))
    return decode_pb2.DecodeGenerateRequest(
        request_id="request",
        prompt_ids=pack_ids(ids),
        output_ids=pack_ids(output or []),
        root_key=root,
        block_keys=keys,
        sampling=convert.sampling_to_pb(sampling),
        prefill_targets=[decode_pb2.PrefillTarget(peer=convert.peer_to_pb(peer)) for peer in targets],
        **fields,
    )


def start_request(process: ReplicaProcess, ids: list[int], puller: Peer, **fields: Any) -> prefill_pb2.StartRequest:
    root, keys = keys_of(ids, process)
    values = {"lease_ttl_s": 30.0, "sampling": convert.sampling_to_pb(Sampling(max_tokens=16, seed=1))}
    return prefill_pb2.StartRequest(
        request_id="request",
        prompt_ids=pack_ids(ids),
        root_key=root,
        block_keys=keys,
        puller=convert.peer_to_pb(puller),
        **(values | fields),
    )


@dataclass
class Answer:
    """What a Generate stream told."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    legs: list[tuple[str, str]] = field(default_factory=list)
    held: int = 0
    usage: Usage | None = None
    reason: str = ""

    def take(self, response: decode_pb2.DecodeGenerateResponse) -> None:
        match response.WhichOneof("event"):
            case "accepted":
                self.held = response.accepted.held_tokens
            case "tokens":
                ids = list(unpack_ids(response.tokens.ids))
                self.positions += range(response.tokens.position, response.tokens.position + len(ids))
                self.ids += ids
            case "prefill_leg":
                leg = response.prefill_leg
                state = decode_pb2.PrefillLeg.State.Name(leg.state).removeprefix("STATE_").lower()
                self.legs.append((state, leg.reason))
            case "finished":
                self.usage = convert.usage_from_pb(response.finished.usage)
                self.reason = convert.finish_reason_from_pb(response.finished.reason)


@asynccontextmanager
async def generating(
    process: ReplicaProcess, request: decode_pb2.DecodeGenerateRequest, timeout_s: float = CALL_S
) -> AsyncIterator[grpc.aio.UnaryStreamCall]:
    """Have a Generate stream open; cancelled with the block."""
    channel = open_channel(process.peer.address)
    call = DecodeStub(channel).Generate(request, timeout=timeout_s)
    try:
        yield call
    finally:
        call.cancel()
        await channel.close()


async def generate(
    process: ReplicaProcess, request: decode_pb2.DecodeGenerateRequest, timeout_s: float = CALL_S
) -> Answer:
    answer = Answer()
    async with generating(process, request, timeout_s) as call:
        async for response in call:
            answer.take(response)
    return answer
