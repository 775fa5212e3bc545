"""Pull of a prompt through the whole path, against a raw NIXL READ of as many bytes between the same two processes."""

import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

import decode_svc.worker
from bench.kv_asking import PROMPT_TOKENS, TOKEN_BYTES, WHOLE_KIB, Asker
from bench.lone_replica import LoneReplica
from bench.report import Report
from kvrelay.config import ReplicaConfig
from kvrelay.engine.protocol import AgentInfo, ClearCache
from kvrelay.engine.runner import KvMemory
from kvrelay.kv.nixl_agent import Agent, transport_name
from kvrelay.replica.process import ReplicaProcess
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.replica_client import KvSourceClient
from kvrelay.types import Peer

PROMPT_BYTES: Final = PROMPT_TOKENS * TOKEN_BYTES
KV_MIB: Final = 256
"""Of each pool: 2.8 prompts, so that three of them have touched, and so mapped, every page."""
WARM_UPS: Final = 4
SAMPLES: Final = 40
SAMPLES_QUICK: Final = 12
RAW_TIMEOUT_S: Final = 30.0
CALL_TIMEOUT_S: Final = 10.0


async def measure_pull(report: Report, *, quick: bool) -> None:
    """Pull the same prompt again and again, and after each pull read as many bytes in one piece."""
    profile = f"kv_bytes_per_token={TOKEN_BYTES}"
    flags = {"role": "prefill", "engine": "mock", "kv_mib": KV_MIB, "mock_profile": profile, "piece_kib": WHOLE_KIB}
    decode = ReplicaProcess(
        ReplicaConfig(role="decode", engine="mock", kv_mib=KV_MIB, mock_profile=profile, registry="", log_level="error")
    )
    decode_svc.worker.register(decode)
    with (
        tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder,
        LoneReplica(flags, Path(folder, "log")) as prefill,
    ):
        await decode.start()
        try:
            await _measure(report, decode, prefill.peer, samples=SAMPLES_QUICK if quick else SAMPLES)
        finally:
            await decode.stop()


async def _measure(report: Report, decode: ReplicaProcess, peer: Peer, *, samples: int) -> None:
    raw = RawReader(await _handshake(decode, peer))
    channel = open_channel(decode.peer.address)
    try:
        asker = Asker(channel)
        prompt = asker.new_prompt()
        pulls, raws, descriptors = [], [], []
        for number in range(WARM_UPS + samples):
            usage = (await asker.ask(prompt, peer)).usage
            assert usage.pulled_bytes == PROMPT_BYTES, usage
            decode.bridge.send(ClearCache())
            raw_s = raw.read()
            if number >= WARM_UPS:
                pulls.append(usage.pulled_bytes / usage.pull_s / 1e9)
                raws.append(PROMPT_BYTES / raw_s / 1e9)
                descriptors.append(float(usage.pull_descriptors))
    finally:
        await channel.close()
        raw.close()
    report.add("pull_gb_s", pulls)
    report.add("raw_gb_s", raws)
    report.add("pull_descriptors", descriptors)
    report.add("pull_share_of_raw", [pull / one for pull, one in zip(pulls, raws, strict=True)])
    report.notes.append(
        f"pull: {PROMPT_TOKENS} tokens of {TOKEN_BYTES} bytes (the bundled model's in bf16), mock engine, between two "
        f"processes over NIXL ({transport_name(os.environ)}); KV complete before its pull, so that nothing else runs; "
        "after each pull a raw READ of as many bytes by one descriptor from the same memory; median of the ratios"
    )


async def _handshake(decode: ReplicaProcess, peer: Peer) -> AgentInfo:
    return await KvSourceClient(decode.channels.get(peer.address)).handshake(
        puller=decode.peer,
        layout=decode.bridge.started.agent.layout,
        identity=decode.identity,
        owner_incarnation=peer.incarnation,
        timeout_s=CALL_TIMEOUT_S,
    )


class RawReader:
    """Reads the front of a replica's pool by one descriptor, into memory of its own."""

    def __init__(self, source: AgentInfo) -> None:
        self._memory = np.ones(PROMPT_BYTES, np.uint8)  # ones, so that every page is mapped
        address = self._memory.ctypes.data
        local = KvMemory(base_address=address, pages=1, page_bytes=PROMPT_BYTES)
        self._agent = Agent(f"bench-raw-{secrets.token_hex(4)}", local)
        self._source = source
        self._peer = self._agent.connect(source.agent_metadata)
        self._local = np.array([[address, PROMPT_BYTES, 0]], np.uint64)
        self._remote = np.array([[source.base_address, PROMPT_BYTES, source.device_id]], np.uint64)

    def read(self) -> float:
        """Read once and return the time it took, s, with the preparing that a pull has too."""
        started_s = time.perf_counter()
        handle = self._agent.prepare(self._peer, self._local, self._remote, self._source.memory)
        done = self._agent.post(handle)
        while not done:
            if time.perf_counter() - started_s > RAW_TIMEOUT_S:
                raise TimeoutError(f"a raw READ was not done after {RAW_TIMEOUT_S:g} s")
            time.sleep(0)
            done = self._agent.done(handle)
        elapsed_s = time.perf_counter() - started_s
        self._agent.release(handle)
        return elapsed_s

    def close(self) -> None:
        """Close the agent."""
        self._agent.close()
