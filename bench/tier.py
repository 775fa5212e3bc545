"""The disk tier: a prompt loaded after a restart against the same prompt computed, and how often the faster is picked.

The first part runs the bundled model. The second is a sweep over prefix length and over how slow the disk is made, on
the mock engine with a fixed price a token and KV of a real size: of each cell both sides are measured by forcing them,
and free choices are compared with the faster one.
"""

import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from unittest import mock

from bench.report import Report, main
from bench.tier_engine import Slowness, SteeredTimes, TierEngine, slowed
from kvrelay.config import PAGE_TOKENS_CPU, EngineConfig
from kvrelay.engine import tier_loads, tier_setup

REAL_TOKENS: Final = 2048
REAL_TOKENS_QUICK: Final = 512
TAIL_TOKENS: Final = 16

MOCK_PROFILE: Final = "kv_bytes_per_token=4096,prefill_ms_per_token=0.1"
"""10,000 prompt tokens a second, 41 MB/s of KV: with these, either side wins somewhere in the sweep."""
LENGTHS: Final = (64, 128, 256, 512, 1024, 2048, 4096)
LENGTHS_QUICK: Final = (64, 512, 2048)
SLOWNESSES: Final = (
    Slowness(),
    Slowness(bytes_per_s=200e6),
    Slowness(bytes_per_s=80e6),
    Slowness(page_latency_s=0.002),
    Slowness(bytes_per_s=30e6),
    Slowness(page_latency_s=0.005),
)
SLOWNESSES_QUICK: Final = (Slowness(), Slowness(bytes_per_s=200e6), Slowness(page_latency_s=0.005))
CHOICES: Final = 3
MEASUREMENTS: Final = 3
WARM_UP_LENGTHS: Final = (256, 2048)
"""Loads and prompts that both sides are known by before the choices count."""
TIE_SHARE: Final = 0.1
"""When the slower side takes at most so much longer, either choice is right: timings are no finer."""


def measure_real(report: Report, *, quick: bool) -> None:
    """Measure time to first token of a prompt before and after a restart, on the bundled model."""
    tokens = REAL_TOKENS_QUICK if quick else REAL_TOKENS
    ids = _prompt(random.Random(1), tokens)
    with tempfile.TemporaryDirectory(prefix="kvrelay-tier-") as folder:
        config = EngineConfig(threads=1, disk_tier_dir=folder)
        with TierEngine(config) as engine:
            engine.ask(_prompt(random.Random(2), tokens))  # the first prompt of a process pays for its set-up
            computed = engine.ask(ids)
            engine.wait_written()
        with TierEngine(config) as engine:
            engine.ask(_prompt(random.Random(3), PAGE_TOKENS_CPU))
            loaded = engine.ask(ids)
    load = loaded.load
    assert load is not None
    assert load.choice == "loaded"
    report.add("tier_ttft_computed_s", [computed.first_s])
    report.add("tier_ttft_loaded_s", [loaded.first_s])
    report.add("tier_load_gb_per_s", [load.bytes / load.elapsed_s / 1e9])
    report.notes.append(f"{tokens} tokens, {load.bytes / 1e6:.0f} MB of KV; the system may have cached the files")


def measure_choices(report: Report, *, quick: bool) -> None:
    """Measure the share of right choices over the sweep."""
    lengths, slownesses = (LENGTHS_QUICK, SLOWNESSES_QUICK) if quick else (LENGTHS, SLOWNESSES)
    right: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kvrelay-tier-") as folder:
        config = EngineConfig(engine="mock", mock_profile=MOCK_PROFILE, kv_mib=1024, disk_tier_dir=folder)
        sweep = Sweep(lengths, measurements=1 if quick else MEASUREMENTS)
        with TierEngine(config) as engine:
            for ids in sweep.prompts():
                engine.ask(ids)
                engine.wait_written()
        for slowness in slownesses:
            right += sweep.run(config, slowness)
    report.add("tier_choice_right_share", right, statistics.fmean)
    report.notes.append(f"choices on the mock engine; sides within {TIE_SHARE:.0%} count as right either way")


class Sweep:
    """Prompts of several lengths that lie on disk, asked of engines whose disks differ in speed."""

    def __init__(self, lengths: Sequence[int], *, measurements: int) -> None:
        self._lengths = lengths
        self._measurements = measurements

    def prompts(self) -> list[list[int]]:
        """Return every prompt that `run` asks for."""
        draw = random.Random(4)
        per_length = CHOICES + 2 * self._measurements
        sizes = [*(WARM_UP_LENGTHS * 2), *(length for length in self._lengths for _ in range(per_length))]
        return [_prompt(draw, size) for size in sizes]

    def run(self, config: EngineConfig, slowness: Slowness) -> list[float]:
        """Return 1.0 for each free choice that was right, 0.0 for the others."""
        prompts = iter(self.prompts())
        steered = SteeredTimes()
        with (
            mock.patch.object(tier_setup, "DiskTier", slowed(slowness)),
            mock.patch.object(tier_loads, "LoadTimes", steered.make),
            TierEngine(config) as engine,
        ):
            for load in (True, False):
                steered.forced = load
                for _ in WARM_UP_LENGTHS:
                    engine.ask(next(prompts))
            right: list[float] = []
            for _ in self._lengths:
                steered.forced = None
                picked = [engine.ask(next(prompts)).loaded for _ in range(CHOICES)]
                steered.forced = True
                load_s = statistics.median(engine.ask(next(prompts)).first_s for _ in range(self._measurements))
                steered.forced = False
                compute_s = statistics.median(engine.ask(next(prompts)).first_s for _ in range(self._measurements))
                tie = abs(load_s - compute_s) <= TIE_SHARE * min(load_s, compute_s)
                right += [float(tie or loaded == (load_s < compute_s)) for loaded in picked]
        return right


def _prompt(draw: random.Random, tokens: int) -> list[int]:
    return draw.choices(range(1, 500), k=tokens + TAIL_TOKENS)


def measure(quick: bool, report: Report) -> None:  # noqa: FBT001 - the one form of a benchmark
    """Measure both."""
    measure_real(report, quick=quick)
    measure_choices(report, quick=quick)


if __name__ == "__main__":
    main(Path(__file__).stem, measure)
