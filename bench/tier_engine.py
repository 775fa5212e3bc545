"""An engine core of this process with a disk tier, for the benchmark of the tier."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from bench.local_fleet import wait_for
from kvrelay.config import EngineConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.loop import make_runner
from kvrelay.engine.protocol import Ended, Event, Generate, Prompt, TierLoad, TierWrote, Tokens
from kvrelay.kv.keys import block_keys, root_key
from kvrelay.kv.load_times import LoadTimes, Source
from kvrelay.kv.memory import MemoryNetwork, MemoryTransfer
from kvrelay.kv.tiers.disk import DiskTier
from kvrelay.kv.tiers.tier import Outcome, PageKeys
from kvrelay.types import Sampling, Usage, pack_ids

REQUEST_TIMEOUT_S: Final = 300.0
WRITE_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.0002


@dataclass(frozen=True, slots=True)
class Slowness:
    """How slow a disk is made."""

    page_latency_s: float = 0.0
    bytes_per_s: float = float("inf")


def slowed(slowness: Slowness) -> type[DiskTier]:
    """Return the class of a disk tier whose reads take longer."""

    class SlowDisk(DiskTier):
        def get(self, page: PageKeys, into: memoryview) -> Outcome:
            end_s = time.monotonic() + slowness.page_latency_s + len(into) / slowness.bytes_per_s
            outcome = super().get(page, into)
            time.sleep(max(end_s - time.monotonic(), 0.0))
            return outcome

    return SlowDisk


class SteeredTimes:
    """Makes load times whose predictions can be forced to mean one side.

    Attributes:
        forced: True: load; False: compute; None: as predicted.
    """

    def __init__(self) -> None:
        self.forced: bool | None = None

    def make(self, *, clock: object) -> LoadTimes:  # noqa: ARG002 - the signature of LoadTimes
        """Return load times that ask here first."""
        steering = self

        class Steered(LoadTimes):
            def predict(self, source: Source, size_bytes: int) -> float:
                predicted_s = super().predict(source, size_bytes)
                if steering.forced is None:
                    return predicted_s
                return 0.0 if steering.forced else float("inf")

        return Steered(clock=time.monotonic)


@dataclass(frozen=True, slots=True)
class Asked:
    """Time to first token, s, what became of what the tier held, the answer, and what it cost."""

    first_s: float
    load: TierLoad | None
    ids: list[int]
    usage: Usage

    @property
    def loaded(self) -> bool:
        """The prefix was loaded."""
        return self.load is not None and self.load.choice == "loaded"


class TierEngine:
    """Runs an engine core step by step; a context manager."""

    def __init__(self, config: EngineConfig) -> None:
        self._events: list[Event] = []
        self._asked = 0
        self._pages = 0
        self._block_tokens = config.block_tokens
        runner = make_runner(config)
        self._page_bytes, self._page_tokens = runner.layout.page_bytes, runner.layout.page_tokens
        self._core = EngineCore(
            config,
            runner,
            MemoryTransfer(MemoryNetwork(), "bench"),
            replica_id="bench",
            incarnation="bench",
            emit=self._events.append,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._core.close()

    def ask(self, ids: list[int], *, max_tokens: int = 1) -> Asked:
        """Have tokens written after a prompt."""
        self._asked += 1
        self._pages += len(ids) // self._page_tokens
        root = root_key(model_fingerprint="bench", tokenizer_fingerprint="bench", block_tokens=self._block_tokens)
        packed = pack_ids(ids)
        prompt = Prompt(prompt_ids=packed, root_key=root, block_keys=block_keys(root, packed, self._block_tokens))
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        seen, started_s = len(self._events), time.perf_counter()
        self._core.handle(Generate(job_id=str(self._asked), prompt=prompt, sampling=sampling))
        self._step_until(Tokens, seen)
        first_s = time.perf_counter() - started_s
        self._step_until(Ended, seen)
        told = self._events[seen:]
        load = next((event for event in told if isinstance(event, TierLoad)), None)
        ended = next(event for event in told if isinstance(event, Ended))
        answer = [token for event in told if isinstance(event, Tokens) for token in event.ids]
        return Asked(first_s, load, answer, ended.usage)

    def wait_written(self) -> None:
        """Wait until every prompt asked for so far, if none was there before, is on disk."""
        wait_for("pages to be written", self._all_written, timeout_s=WRITE_TIMEOUT_S)

    def _all_written(self) -> bool:
        self._core.step()
        written = sum(event.bytes for event in self._events if isinstance(event, TierWrote))
        return written >= self._pages * self._page_bytes

    def _step_until(self, kind: type[Event], seen: int) -> None:
        end_s = time.monotonic() + REQUEST_TIMEOUT_S
        while not any(isinstance(event, kind) for event in self._events[seen:]):
            assert time.monotonic() < end_s, "the engine does not answer"
            if not self._core.step():
                time.sleep(POLL_S)
