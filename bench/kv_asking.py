"""Asks a decode replica, without a router, and notes when its tokens come."""

import itertools
import random
import time
from dataclasses import dataclass
from typing import Final

import grpc.aio

from kvrelay.config import BLOCK_TOKENS
from kvrelay.decode_events import Finished
from kvrelay.engine.protocol import Prompt
from kvrelay.kv.keys import block_keys, root_key
from kvrelay.rpc.convert import TokenSpan
from kvrelay.rpc.decode_client import DecodeClient, DecodeOrder
from kvrelay.types import Peer, Sampling, Usage, pack_ids

PROMPT_TOKENS: Final = 4096
OUTPUT_TOKENS: Final = 2
TOKEN_BYTES: Final = 23_040
"""KV of a token of SmolLM2-135M in bf16: 30 layers x 2 x 3 heads x 64 x 2 bytes."""
WHOLE_KIB: Final = 1 << 30
"""A piece larger than any prompt: nothing is announced before the prompt is complete."""
BYTE_IDS: Final = range(1, 257)
"""Ids that the mock model takes for bytes of text."""
REQUEST_TIMEOUT_S: Final = 60.0
ROOT_KEY: Final = root_key(model_fingerprint="bench", tokenizer_fingerprint="bench", block_tokens=BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Asked:
    """Times from the request to its tokens, s, and what the answer cost."""

    first_s: float
    second_s: float
    usage: Usage


class Asker:
    """Asks one decode replica. Fails rather than have a prompt read where it is answered."""

    def __init__(self, channel: grpc.aio.Channel, seed: int = 0) -> None:
        self._decode = DecodeClient(channel)
        self._random = random.Random(seed)
        self._numbers = itertools.count(1)

    def new_prompt(self) -> list[int]:
        """Return a prompt that nobody has seen."""
        return self._random.choices(BYTE_IDS, k=PROMPT_TOKENS)

    async def ask(self, ids: list[int], target: Peer) -> Asked:
        """Ask for the first tokens after a prompt that `target` reads."""
        packed = pack_ids(ids)
        order = DecodeOrder(
            request_id=f"bench-{next(self._numbers)}",
            attempt=1,
            prompt=Prompt(
                prompt_ids=packed,
                output_ids=b"",
                root_key=ROOT_KEY,
                block_keys=block_keys(ROOT_KEY, packed, BLOCK_TOKENS),
            ),
            sampling=Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            targets=(target,),
            never_local=True,
        )
        started_s = time.perf_counter()
        arrivals_s: list[float] = []
        usage = Usage()
        async for event in self._decode.generate(order, timeout_s=REQUEST_TIMEOUT_S):
            if isinstance(event, TokenSpan):
                arrivals_s += [time.perf_counter() - started_s] * len(event.ids)
            elif isinstance(event, Finished):
                usage = event.usage
        first_s, second_s = arrivals_s
        return Asked(first_s, second_s, usage)
