"""How much of a transfer over a slow link is hidden behind prefill, with KV announced as a whole or chunk by chunk."""

import contextlib
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from bench.kv_asking import PROMPT_TOKENS, TOKEN_BYTES, WHOLE_KIB, Asked, Asker
from bench.lone_replica import LoneReplica
from bench.netns import TwoHosts
from bench.report import Report
from kvrelay.config import PIECE_KIB
from kvrelay.rpc.channel import open_channel
from kvrelay.types import Peer

PREFILL_MS_PER_TOKEN: Final = 0.4
"""Makes prefill take 2 s, with what the mock itself needs: long beside the noise of a busy machine, short enough for a
quick run within a minute."""
STEP_MS: Final = 5.0
TRANSFER_SHARE: Final = 0.5
"""Time of the whole transfer over the slowed link, as a share of prefill's."""
KV_MIB: Final = 192
"""Of each pool: two prompts of the benchmark."""
PAIRS: Final = 10
PAIRS_QUICK: Final = 3
PUBLISHED: Final = "published +64 % (whole) and +16.5 % (by chunk or layer)"


@dataclass(frozen=True, slots=True)
class Pair:
    """The same question over the link as it is, and slowed."""

    free: Asked
    slow: Asked

    @property
    def added_s(self) -> float:
        """What the slow link added to the time to the second token, s."""
        return self.slow.second_s - self.free.second_s


async def measure_hidden(report: Report, *, quick: bool) -> None:
    """Ask over the free and the slowed link, in pairs.

    Raises:
        NotPossibleError: namespaces cannot be made here.
    """
    with _terminable(), contextlib.ExitStack() as stack:
        hosts = stack.enter_context(TwoHosts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-bench-")))
        whole = stack.enter_context(_replica(hosts, "a", folder / "whole.log", role="prefill", piece_kib=WHOLE_KIB))
        chunk = stack.enter_context(_replica(hosts, "a", folder / "chunk.log", role="prefill", piece_kib=PIECE_KIB))
        decode = stack.enter_context(_replica(hosts, "b", folder / "decode.log", role="decode", bind="0.0.0.0"))  # noqa: S104 - inside a namespace
        port = decode.peer.address.rpartition(":")[2]
        channel = open_channel(f"{hosts.entrance}:{port}")
        try:
            asker = Asker(channel)
            # The first questions connect the replicas and map the pools' memory.
            warm_ups = [await asker.ask(asker.new_prompt(), peer) for peer in (whole.peer, chunk.peer)]
            rate = PROMPT_TOKENS * TOKEN_BYTES / (min(asked.first_s for asked in warm_ups) * TRANSFER_SHARE)
            pairs: dict[str, list[Pair]] = {"whole": [], "chunk": []}
            for number in range(PAIRS_QUICK if quick else PAIRS):
                for way, peer in (("whole", whole.peer), ("chunk", chunk.peer)):
                    pairs[way].append(await _ask_pair(asker, hosts, peer, rate, slow_first=bool(number % 2)))
        finally:
            await channel.close()
    _report(report, whole=pairs["whole"], chunk=pairs["chunk"])


async def _ask_pair(asker: Asker, hosts: TwoHosts, peer: Peer, bytes_per_s: float, *, slow_first: bool) -> Pair:
    asked: dict[bool, Asked] = {}
    for slow in (slow_first, not slow_first):
        if not slow:
            asked[slow] = await asker.ask(asker.new_prompt(), peer)
            continue
        hosts.slow(bytes_per_s)
        try:
            asked[slow] = await asker.ask(asker.new_prompt(), peer)
        finally:
            hosts.free()
    return Pair(asked[False], asked[True])


def _report(report: Report, *, whole: list[Pair], chunk: list[Pair]) -> None:
    transfer_s = statistics.median(pair.slow.usage.pull_s for pair in whole)
    free_s = statistics.median(pair.free.second_s for pair in whole + chunk)
    first_s = statistics.median(pair.free.first_s for pair in whole + chunk)
    added_whole_s = statistics.median(pair.added_s for pair in whole)
    added_chunk_s = statistics.median(pair.added_s for pair in chunk)
    report.add("transfer_shaped_ms", [pair.slow.usage.pull_s * 1e3 for pair in whole])
    report.add("second_token_added_ms_whole", [pair.added_s * 1e3 for pair in whole])
    report.add("second_token_added_ms_chunk", [pair.added_s * 1e3 for pair in chunk])
    report.add("hidden_share_shaped", [1 - pair.added_s / transfer_s for pair in chunk])
    report.notes.append(
        f"shaped: {PROMPT_TOKENS} tokens of {TOKEN_BYTES} bytes between two network namespaces, UCX over tcp, on a "
        f"link whose transfer takes {transfer_s / first_s:.0%} of prefill's {first_s * 1e3:.0f} ms; mock engine, "
        f"{PREFILL_MS_PER_TOKEN:g} ms a prompt token; added against the same fleet over the unshaped link, in pairs"
    )
    report.notes.append(
        f"added to the time to the second token ({free_s * 1e3:.0f} ms over the unshaped link): whole "
        f"{added_whole_s / free_s:+.1%}, by chunk {added_chunk_s / free_s:+.1%}, beside the {PUBLISHED}"
    )
    report.notes.append(
        "layer groups within the last chunk are not built: all that they could save is second_token_added_ms_chunk"
    )


def _replica(hosts: TwoHosts, end: str, log: Path, **flags: object) -> LoneReplica:
    profile = f"prefill_ms_per_token={PREFILL_MS_PER_TOKEN},step_ms={STEP_MS},kv_bytes_per_token={TOKEN_BYTES}"
    settings: dict[str, object] = {
        "engine": "mock",
        "mock_profile": profile,
        "kv_mib": KV_MIB,
        "stock_share": 1.0,
        "bind": hosts.address[end],
        "advertise": hosts.address[end],
        "replica_id": log.stem,
    }
    # Two namespaces of one machine could still copy through shared memory; a real network has none.
    env = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": hosts.device[end]}
    return LoneReplica(settings | flags, log, env=env, within=lambda command: hosts.command(end, command))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM end this process by an exception, so that what was made is removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
