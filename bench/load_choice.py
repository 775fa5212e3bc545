"""How often load-or-recompute picks the side that is faster, both sides measured.

A decode replica that holds nothing is asked for prompts whose prefix another one holds. The sweep is over prefix length
and over how slow that holder is made. Of each cell, both sides are measured by forcing them, and free choices are
compared with the faster one. Engines are mocks with a fixed price a token and KV of a real size; all else is real.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final
from unittest import mock

import decode_svc.worker
from bench.report import Report, main
from bench.slow_transfer import Slowness, SlowTransfer
from kvrelay.config import BLOCK_TOKENS, ReplicaConfig
from kvrelay.decode_events import Finished
from kvrelay.engine import loop
from kvrelay.engine.protocol import Prompt
from kvrelay.kv.keys import block_keys, root_key
from kvrelay.kv.load_times import LoadTimes, Source
from kvrelay.kv.transfer import Transfer
from kvrelay.replica.process import ReplicaProcess
from kvrelay.rpc.convert import TokenSpan
from kvrelay.rpc.decode_client import DecodeClient, DecodeOrder
from kvrelay.types import Holder, Sampling, Usage, pack_ids

TOKEN_BYTES: Final = 4096
"""KV of a token: a small model's; 4,096 tokens are 17 MB."""
READER_PROFILE: Final = f"kv_bytes_per_token={TOKEN_BYTES},prefill_ms_per_token=0.1"
"""10,000 prompt tokens a second: with these, either side wins somewhere in the sweep."""
HOLDER_PROFILE: Final = f"kv_bytes_per_token={TOKEN_BYTES}"

LENGTHS: Final = (64, 128, 256, 512, 1024, 2048, 4096)
LENGTHS_QUICK: Final = (64, 512, 4096)
SLOWNESSES: Final = (
    Slowness(),
    Slowness(latency_s=0.02),
    Slowness(bytes_per_s=400e6),
    Slowness(bytes_per_s=100e6),
    Slowness(latency_s=0.05, bytes_per_s=50e6),
    Slowness(latency_s=0.005, bytes_per_s=25e6),
)
SLOWNESSES_QUICK: Final = (Slowness(), Slowness(latency_s=0.05, bytes_per_s=50e6), Slowness(bytes_per_s=25e6))
CHOICES: Final = 3
MEASUREMENTS: Final = 3
WARM_UP_LENGTHS: Final = (256, 2048)
"""Loads that each source is known by before the choices count."""
TIE_SHARE: Final = 0.1
"""When the slower side takes at most so much longer, either is right: timings of a shared machine are no finer."""
TAIL_TOKENS: Final = 16
REQUEST_TIMEOUT_S: Final = 60.0
ROOT_KEY: Final = root_key(model_fingerprint="bench", tokenizer_fingerprint="bench", block_tokens=BLOCK_TOKENS)


class Forced(LoadTimes):
    """Makes every choice the same and lets the free one learn from what follows."""

    def __init__(self, free: LoadTimes, *, load: bool) -> None:
        super().__init__(clock=time.monotonic)
        self._free = free
        self._load_s = 0.0 if load else float("inf")

    def predict(self, source: Source, size_bytes: int) -> float:  # noqa: ARG002 - the same whatever is asked
        """Return what makes the choice."""
        return self._load_s

    def learn(self, source: Source, size_bytes: int, elapsed_s: float) -> None:
        """Have the free choice learn."""
        self._free.learn(source, size_bytes, elapsed_s)


@dataclass(frozen=True, slots=True)
class Asked:
    """Time to first token, s, and whether the prefix was loaded."""

    first_s: float
    loaded: bool


class Sweep:
    """Asks the reader for prompts that the holder holds."""

    def __init__(self, holder: ReplicaProcess, reader: ReplicaProcess) -> None:
        self._holder = holder
        self._reader = reader
        self._random = random.Random(1)
        self._numbers = itertools.count(1)

    async def cell(self, tokens: int, *, choices: int, measurements: int) -> list[float]:
        """Return 1.0 for each free choice that was right, 0.0 for the others."""
        picked = [(await self.ask(tokens)).loaded for _ in range(choices)]
        load_s, compute_s = [], []
        for _ in range(measurements):
            load_s.append(await self.forced(tokens, load=True))
            compute_s.append(await self.forced(tokens, load=False))
        load, compute = statistics.median(load_s), statistics.median(compute_s)
        if abs(load - compute) <= TIE_SHARE * min(load, compute):
            return [1.0] * choices
        return [float(loaded == (load < compute)) for loaded in picked]

    async def forced(self, tokens: int, *, load: bool) -> float:
        """Return the time to first token when the choice is made for the replica, s."""
        puller = self._reader.prefix_pull
        free, puller.times = puller.times, Forced(puller.times, load=load)
        try:
            asked = await self.ask(tokens)
        finally:
            puller.times = free
        assert asked.loaded == load
        return asked.first_s

    async def ask(self, tokens: int) -> Asked:
        """Have the holder hold a new prefix, and ask the reader for a prompt that begins with it."""
        ids = self._random.choices(range(1, 257), k=tokens + TAIL_TOKENS)
        await self._generate(self._holder, ids, holder=None)
        started_s = time.perf_counter()
        first_at_s, usage = await self._generate(
            self._reader, ids, holder=Holder(self._holder.peer, tokens // BLOCK_TOKENS)
        )
        return Asked(first_at_s - started_s, usage.pulled_tokens > 0)

    async def _generate(self, process: ReplicaProcess, ids: list[int], *, holder: Holder | None) -> tuple[float, Usage]:
        packed = pack_ids(ids)
        order = DecodeOrder(
            request_id=f"bench-{next(self._numbers)}",
            attempt=1,
            prompt=Prompt(prompt_ids=packed, root_key=ROOT_KEY, block_keys=block_keys(ROOT_KEY, packed, BLOCK_TOKENS)),
            sampling=Sampling(max_tokens=1, ignore_eos=True),
            holder=holder,
        )
        client = DecodeClient(process.channels.get(process.peer.address))
        first_at_s, usage = 0.0, Usage()
        async for event in client.generate(order, timeout_s=REQUEST_TIMEOUT_S):
            if isinstance(event, TokenSpan):
                first_at_s = first_at_s or time.perf_counter()
            elif isinstance(event, Finished):
                usage = event.usage
        return first_at_s, usage


async def load_choice_right_share(
    lengths: Iterable[int], slownesses: Iterable[Slowness], *, choices: int, measurements: int
) -> list[float]:
    """Return 1.0 or 0.0 for each free choice of a sweep."""
    slowness = Slowness()
    right: list[float] = []
    async with (
        replica("holder", HOLDER_PROFILE, Slowness()) as holder,
        replica("reader", READER_PROFILE, slowness) as reader,
    ):
        sweep = Sweep(holder, reader)
        await sweep.forced(WARM_UP_LENGTHS[0], load=True)  # makes the connection
        for wanted in slownesses:
            slowness.latency_s, slowness.bytes_per_s = wanted.latency_s, wanted.bytes_per_s
            # Another source, as far as what was measured goes.
            reader.prefix_pull.times = LoadTimes(clock=time.monotonic)
            for tokens in WARM_UP_LENGTHS:
                await sweep.forced(tokens, load=True)
                await sweep.forced(tokens, load=False)
            for tokens in lengths:
                right += await sweep.cell(tokens, choices=choices, measurements=measurements)
    return right


@asynccontextmanager
async def replica(name: str, profile: str, slowness: Slowness) -> AsyncIterator[ReplicaProcess]:
    """Run a decode replica in this process whose reads are slowed."""
    make = loop.make_transfer

    def slowed(agent_name: str) -> Transfer:
        return SlowTransfer(make(agent_name), slowness)

    config = ReplicaConfig(
        role="decode", replica_id=name, engine="mock", model="mock", mock_profile=profile, kv_mib=256
    )
    process = ReplicaProcess(replace(config, registry="", port=0))
    decode_svc.worker.register(process)
    with mock.patch.object(loop, "make_transfer", slowed):
        await process.start()
    try:
        yield process
    finally:
        await process.stop()


def measure(quick: bool, report: Report) -> None:  # noqa: FBT001 - the one form of a benchmark
    """Measure the share of right choices."""
    lengths, slownesses = (LENGTHS_QUICK, SLOWNESSES_QUICK) if quick else (LENGTHS, SLOWNESSES)
    right = asyncio.run(
        load_choice_right_share(lengths, slownesses, choices=CHOICES, measurements=1 if quick else MEASUREMENTS)
    )
    report.add("load_choice_right_share", right, statistics.fmean)
    report.notes.append(f"mock engine; sides within {TIE_SHARE:.0%} of each other count as right either way")


if __name__ == "__main__":
    main("load_choice", measure)
