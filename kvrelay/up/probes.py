"""Whether a child is ready."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.rpc.channel import open_channel
from kvrelay.up.plan import ChildSpec, Kind
from kvrelay.up.store import answers_ping

Probe: TypeAlias = Callable[[ChildSpec], Awaitable[bool]]
"""Tells whether a child is ready now; the caller bounds the wait."""

SERVING = "serving"
NOT_SERVING = "not serving"

PROBE_TIMEOUT_S = 2.0
"""A loaded laptop answers a health check in far less; a process that takes longer is not ready."""


async def is_ready(spec: ChildSpec) -> bool:
    """Whether a child of a real fleet is ready: the store answers, a server's own health check passes."""
    if spec.kind is Kind.STORE:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await answers_ping(spec.address)
        except TimeoutError:
            return False
    return await is_serving(spec.address)


async def is_serving(address: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether the gRPC server at host:port says that it is healthy."""
    return await ask_health(address, timeout_s=timeout_s) == SERVING


async def ask_health(address: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """Return `SERVING`, `NOT_SERVING`, or why the gRPC server at host:port did not answer."""
    request = health_pb2.HealthCheckRequest()
    # A new channel each time: one that has failed would wait longer and longer before it connects again.
    async with open_channel(address) as channel:
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"no answer ({error.code().name})"
    return SERVING if response.status == health_pb2.HealthCheckResponse.SERVING else NOT_SERVING
