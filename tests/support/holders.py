"""Requests that name a holder of the prompt's prefix."""

from support.replicas import BLOCK_TOKENS

from kvrelay.replica.process import ReplicaProcess
from kvrelay.rpc import lease_convert
from kvrelay.types import Holder, Peer
from kvrelay.v1.decode_pb2 import DecodeGenerateRequest

KV_TOKEN_BYTES = 64
"""Of the mock engine, as it comes."""


def whole(tokens: int) -> int:
    """Tokens in whole blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def bytes_of(tokens: int) -> int:
    """KV bytes of the pages that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * KV_TOKEN_BYTES


def with_holder(
    request: DecodeGenerateRequest, holder: ReplicaProcess | Peer, tokens: int, tier: str = "device"
) -> DecodeGenerateRequest:
    """Name a holder of the prompt's first tokens to whoever reads it."""
    peer = holder if isinstance(holder, Peer) else holder.peer
    told = lease_convert.holder_to_pb(Holder(peer, tokens // BLOCK_TOKENS, tier))
    for target in request.prefill_targets:
        target.holder.CopyFrom(told)
    if not request.prefill_targets:
        request.holder.CopyFrom(told)
    return request
