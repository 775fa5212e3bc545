"""The client: asyncio (`AsyncClient`) and blocking (`Client`).

It needs neither torch nor redis nor nixl, and raises the errors of `kvrelay.errors`.

Example:
    from kvrelay.client import Client

    with Client("127.0.0.1:50050") as client:
        for part in client.stream_chat("Why is the sky blue?", max_tokens=64):
            print(part.text, end="", flush=True)
"""

from kvrelay.client.aio import AsyncClient
from kvrelay.client.stream import AnswerStream
from kvrelay.client.sync import Client, SyncAnswerStream
from kvrelay.client.values import (
    Answer,
    Decision,
    Delta,
    Finish,
    FleetStatus,
    Message,
    ModelInfo,
    Options,
    Part,
    ReplicaStatus,
    Slo,
    Tokenized,
)
from kvrelay.types import FinishReason, Sampling, Usage

__all__ = [
    "Answer",
    "AnswerStream",
    "AsyncClient",
    "Client",
    "Decision",
    "Delta",
    "Finish",
    "FinishReason",
    "FleetStatus",
    "Message",
    "ModelInfo",
    "Options",
    "Part",
    "ReplicaStatus",
    "Sampling",
    "Slo",
    "SyncAnswerStream",
    "Tokenized",
    "Usage",
]
