"""Two engine cores in one process: a KV network that copies memory, a clock to turn by hand, and a small front."""

import ctypes
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from kvrelay.config import EngineConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.mock import MockRunner
from kvrelay.engine.protocol import (
    AttachLease,
    Cancel,
    ConfirmLease,
    Ended,
    Failed,
    FirstToken,
    FirstTokenKnown,
    Generate,
    Granted,
    Held,
    LeaseReply,
    PiecesFinal,
    PiecesReady,
    Prefill,
    Prompt,
    Pulled,
    PullFailed,
    ReadLocally,
    ReleaseLeases,
    Tokens,
    Verdict,
)
from kvrelay.kv.keys import block_keys, root_key
from kvrelay.kv.transfer import ReadState, ReadStats
from kvrelay.types import Sampling, pack_ids

BLOCK = 4
STEPS_MAX = 20_000


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


class FakeRead:
    """Copies when it lands: at its `polls_left`-th look, or when the test says so."""

    def __init__(self, network, source, remote_pages, local_base, local_pages, page_bytes):
        self.network = network
        self.copies = [
            (local_base + to * page_bytes, source.base_address + page * page_bytes)
            for page, to in zip(remote_pages, local_pages, strict=True)
        ]
        self.page_bytes = page_bytes
        self.polls_left = network.polls
        self.now = ReadState.PENDING
        self.closed = self.abandoned = False

    def land(self):
        for to, page in self.copies:
            ctypes.memmove(to, page, self.page_bytes)
        self.now = ReadState.DONE

    def fail(self):
        self.now = ReadState.FAILED

    def state(self):
        assert not self.closed
        if self.now is ReadState.PENDING and not self.network.held:
            if self.network.failing:
                self.fail()
            elif self.polls_left == 0:
                self.land()
            self.polls_left -= 1
        return self.now

    def reason(self):
        return "disconnected" if self.now is ReadState.FAILED else ""

    def stats(self):
        assert self.now is ReadState.DONE
        return ReadStats(len(self.copies) * self.page_bytes, len(self.copies), 0.0, "fake")

    def close(self):
        assert self.now is not ReadState.PENDING
        self.closed = True


@dataclass
class Network:
    """Faults of all transfers: `held` READs stay pending, `failing` ones fail, others land after `polls` looks."""

    held: bool = False
    failing: bool = False
    polls: int = 1
    reads: list[FakeRead] = field(default_factory=list)


class FakeTransfer:
    def __init__(self, network, name):
        self.network = network
        self.name = name

    def register(self, *, base_address, page_bytes, **_):
        self.base_address, self.page_bytes = base_address, page_bytes

    def agent(self):
        return self.name, b"metadata"

    def read(self, source, *, remote_pages, local_pages):
        read = FakeRead(self.network, source, remote_pages, self.base_address, local_pages, self.page_bytes)
        self.network.reads.append(read)
        return read

    def abandon(self, read):
        assert read.now is ReadState.PENDING
        read.abandoned = True

    def forget(self, agent_name):
        pass

    def close(self):
        pass


class Replica:
    """A core with the mock runner and every event it told."""

    def __init__(self, name="replica", *, network=None, clock=None, pages=64, **options):
        self.name = name
        self.clock = clock or Clock()
        self.network = network or Network()
        self.events = []
        self.taken = 0
        self.config = EngineConfig(
            **{
                "engine": "mock",
                "block_tokens": BLOCK,
                "page_tokens": BLOCK,
                "chunk_tokens": 16,
                "kv_mib": 1,
                "piece_kib": 0,
            }
            | options
        )
        self.runner = MockRunner(self.config, sleep=self.clock.sleep)
        allocate = self.runner.allocate
        self.runner.allocate = lambda _: allocate(pages)
        self.core = EngineCore(
            self.config,
            self.runner,
            FakeTransfer(self.network, name),
            replica_id=name,
            incarnation=f"{name}-1",
            clock=self.clock,
            emit=self.events.append,
        )
        self.pool = self.core._parts.pool
        self.agent = self.events[0].agent

    def prompt(self, ids, output=()):
        root = root_key(model_fingerprint="m", tokenizer_fingerprint="t", block_tokens=BLOCK)
        packed, output = pack_ids(list(ids)), pack_ids(list(output))
        return Prompt(
            prompt_ids=packed, output_ids=output, root_key=root, block_keys=block_keys(root, packed + output, BLOCK)
        )

    def generate(self, job_id, ids, *, output=(), max_tokens=8, sampling=None, **options):
        sampling = sampling or Sampling(max_tokens=max_tokens)
        self.core.handle(Generate(job_id=job_id, prompt=self.prompt(ids, output), sampling=sampling, **options))

    def prefill(self, job_id, ids, *, output=(), max_tokens=8, sampling=None, lease_ttl_s=30.0, **options):
        sampling = sampling or Sampling(max_tokens=max_tokens)
        prompt = self.prompt(ids, output)
        self.core.handle(Prefill(job_id=job_id, prompt=prompt, sampling=sampling, lease_ttl_s=lease_ttl_s, **options))

    def run(self):
        """Step until there is nothing to do at once."""
        for _ in range(STEPS_MAX):
            if not self.core.step():
                self.core.check_integrity()
                return self
        raise AssertionError("the engine does not come to rest")

    def of(self, kind, job_id=None):
        return [e for e in self.events if isinstance(e, kind) and (job_id is None or e.job_id == job_id)]

    def one(self, kind, job_id=None):
        found = self.of(kind, job_id)
        assert len(found) == 1, (kind, job_id, self.events)
        return found[0]

    def tokens(self, job_id):
        """Tokens told for a job, checked to be without gaps."""
        told = self.of(Tokens, job_id)
        for before, after in itertools.pairwise(told):
            assert after.position == before.position + len(before.ids)
        return [token for event in told for token in event.ids]

    def new_events(self):
        fresh = self.events[self.taken :]
        self.taken = len(self.events)
        return fresh

    def at_rest(self):
        """Assert that nothing but the cache holds pages."""
        self.core.check_integrity()
        pool = self.pool
        assert [pool.count(state) for state in (1, 2, 4)] == [0, 0, 0], "active, leased, quarantined"
        assert pool.reserved == 0
        assert not self.core._parts.jobs


def answer_of(ids, *, max_tokens=8, sampling=None, output=()):
    """What a replica of its own writes."""
    lone = Replica()
    lone.generate("lone", ids, max_tokens=max_tokens, sampling=sampling, output=output)
    lone.run()
    return lone.tokens("lone")


class Fleet:
    """One decode and one prefill replica, and a front that passes their messages on."""

    def __init__(self, *, decode=None, prefill=None):
        self.clock, self.network = Clock(), Network()
        self.decode = Replica("decode", network=self.network, clock=self.clock, **(decode or {}))
        self.prefill = Replica("prefill", network=self.network, clock=self.clock, **(prefill or {}))
        self.requests = {}
        self.answers = defaultdict(list)
        self.ended = {}
        self.leases = {}
        self.paused = set()
        self._calls = {}
        self._numbers = itertools.count(1)

    def ask(self, job_id, ids, *, max_tokens=8, **options):
        sampling = options.pop("sampling", None) or Sampling(max_tokens=max_tokens)
        self.requests[job_id] = (list(ids), sampling)
        self.decode.generate(job_id, ids, sampling=sampling, remote=True, **options)

    def cancel(self, job_id):
        for replica in (self.decode, self.prefill):
            replica.core.handle(Cancel(job_id=job_id))
        if job_id in self.leases:
            self.prefill.core.handle(ReleaseLeases(lease_ids=(self.leases[job_id],)))
        self.ended[job_id] = "cancelled"

    def pump(self):
        """Step both once and pass messages on; True while anything happens."""
        busy = self.prefill.core.step()
        busy |= self._relay(self.prefill, self._from_prefill)
        busy |= self.decode.core.step()
        busy |= self._relay(self.decode, self._from_decode)
        return busy

    def run(self, until=None):
        """Pump until all requests have ended, or a condition holds."""
        for _ in range(STEPS_MAX):
            if until is not None and until():
                return self
            self.pump()
            if until is None and set(self.requests) <= set(self.ended):
                return self
            self.clock.sleep(0.001)
        raise AssertionError(f"not over: {set(self.requests) - set(self.ended)}")

    def at_rest(self):
        self.clock.sleep(60.0)  # leases that nobody confirmed
        self.pump()
        self.decode.at_rest()
        self.prefill.at_rest()

    def _relay(self, replica, handler):
        fresh = replica.new_events()
        for event in fresh:
            handler(event)
        return bool(fresh)

    def _from_prefill(self, event):
        job_id = getattr(event, "job_id", None)
        if isinstance(event, LeaseReply):
            job_id, lease_id = self._calls.pop(event.call_id)
            self.decode.core.handle(Verdict(job_id=job_id, lease_id=lease_id, valid=event.valid))
            if not event.valid:
                self.decode.core.handle(ReadLocally(job_id=job_id))
        elif job_id in self.ended:
            return
        elif isinstance(event, Granted):
            self.leases[job_id] = event.lease.lease_id
            self.decode.core.handle(
                AttachLease(
                    job_id=job_id,
                    lease=event.lease,
                    source=self.prefill.agent,
                    prefill_cached_tokens=event.cached_tokens,
                )
            )
        elif isinstance(event, PiecesFinal):
            self.decode.core.handle(
                PiecesReady(job_id=job_id, lease_id=event.lease_id, pages=event.pages, all=event.all)
            )
        elif isinstance(event, FirstToken):
            self.answers[job_id].append(event.token)
            self.decode.core.handle(
                FirstTokenKnown(job_id=job_id, token=event.token, computed_tokens=event.computed_tokens)
            )
        elif isinstance(event, Failed):
            self.decode.core.handle(ReadLocally(job_id=job_id))

    def _from_decode(self, event):
        job_id = getattr(event, "job_id", None)
        if job_id not in self.requests or job_id in self.ended or (job_id, type(event)) in self.paused:
            return
        if isinstance(event, Held):
            ids, sampling = self.requests[job_id]
            self.prefill.prefill(job_id, ids, sampling=sampling, held_tokens=event.tokens)
        elif isinstance(event, Pulled):
            call_id = next(self._numbers)
            self._calls[call_id] = (job_id, event.lease_id)
            self.prefill.core.handle(ConfirmLease(call_id=call_id, lease_id=event.lease_id, pages=event.pages))
        elif isinstance(event, PullFailed):
            self.prefill.core.handle(ReleaseLeases(lease_ids=(event.lease_id,)))
            self.decode.core.handle(ReadLocally(job_id=job_id))
        elif isinstance(event, Tokens):
            self.answers[job_id] += event.ids
        elif isinstance(event, Ended | Failed):
            self.ended[job_id] = event
