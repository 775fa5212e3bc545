"""One random schedule: requests over a small simulated fleet while hosts, reads, calls and clients misbehave."""

import random
from collections import Counter
from dataclasses import dataclass, field

from kvrelay.config import EngineConfig
from kvrelay.engine.protocol import Event, Failed, Generate, LeasePrefix, ReleaseLeases
from kvrelay.errors import InternalError
from kvrelay.kv.faults import seeded
from kvrelay.kv.memory import MemoryNetwork
from kvrelay.types import Sampling
from ops.chaos.calm import BLOCK_TOKENS, expected, prompt_of
from ops.chaos.draws import draw_mood, draw_prompt
from ops.chaos.host import Host
from ops.chaos.request import Order, Request, WrongError
from ops.chaos.world import KEEPALIVE_S, World

REQUESTS_MIN = 8
REQUESTS_MAX = 20
PAUSES_TICKS = (2, 6, 20)
"""Longest pause between two requests: from a burst to one after the other."""
PAGES = (13, 16, 20)
"""Pools, in blocks: the largest request fills the smallest one, so that pages are used again soon."""
READ_DELAY_POLLS_MAX = 400
"""Polls are one or two a tick: READs may land seconds after they were given up."""
CHURN_TOKENS = (12, 40)
CHURN_DEADLINE_S = 1.0
INTEGRITY_INTERVAL_TICKS = 20
DEADLINE_GRACE_S = 0.1
SETTLE_S = 12.0
"""Longest way back to the baseline: the longest lease, the slowest message and the latest READ, one after another."""
BASELINE_INTERVAL_TICKS = 10
STALL_S = 5.0
"""After this long without a heartbeat a host's requests move."""


@dataclass
class Outcome:
    """What a schedule saw.

    Attributes:
        ended: how many requests ended how.
        legs: how many tries at prefill replicas ended how.
        seen: counts of what happened, to show that it did.
        settled_s: simulated time from the last request's end until everything was given back.
    """

    ended: Counter[str] = field(default_factory=Counter)
    legs: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    settled_s: float = 0.0


def run(seed: int) -> Outcome:
    """Run one schedule; the same seed gives the same one.

    Raises:
        AssertionError: something was wrong, stuck, or kept.
    """
    return Schedule(seed).run()


class Schedule:
    """A fleet, its requests, and what befalls them."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self._seed = seed
        self._mood = draw_mood(rng)
        self._world = World(rng, lost_share=self._mood.lost)
        self._outcome = Outcome()
        self._requests: list[Request] = []
        self._ticks = 0
        self._network = MemoryNetwork()
        self._page_tokens = BLOCK_TOKENS * rng.choice([1, 1, 2])
        for name in ("a", "b", "c")[: rng.choice([2, 3, 3])]:
            self._world.hosts[name] = self._host(name)

    def run(self) -> Outcome:
        """Run it to the end."""
        pause_ticks = self._rng.choice(PAUSES_TICKS)
        for number in range(self._rng.randint(REQUESTS_MIN, REQUESTS_MAX)):
            self._requests.append(Request(self._world, self._order(number)))
            for _ in range(self._rng.randrange(pause_ticks)):
                self._tick(disturbed=True)
        while self._open():
            self._tick(disturbed=True)
        self._settle()
        for request in self._requests:
            self._outcome.ended[request.ended] += 1
            self._outcome.legs.update(request.legs)
        return self._outcome

    def _open(self) -> bool:
        return any(not request.ended for request in self._requests)

    def _tick(self, *, disturbed: bool) -> None:
        if disturbed:
            for host in self._world.hosts.values():
                self._disturb(host)
            for request in self._requests:
                if not request.ended:
                    self._disturb_request(request)
        self._world.tick()
        self._ticks += 1
        now_s = self._world.now_s
        for request in self._requests:
            if not request.ended and now_s > request.order.deadline_at_s + DEADLINE_GRACE_S:
                raise WrongError(f"{request.order.name} runs past its deadline")
        if self._ticks % INTEGRITY_INTERVAL_TICKS == 0:
            self._check()

    def _check(self) -> None:
        for host in self._world.hosts.values():
            if host.alive:
                host.core.check_integrity()

    # ------------------------------------------------------------ what befalls hosts and requests

    def _disturb(self, host: Host) -> None:
        mood, rng = self._mood, self._rng
        if not host.running:
            return
        if rng.random() < mood.kill:
            self._kill(host)
        elif rng.random() < mood.stop:
            self._stop(host)
        elif rng.random() < mood.prefix_lease:
            self._lease_prefix(host)
        elif rng.random() < mood.churn:
            self._churn(host)

    def _kill(self, host: Host) -> None:
        self._outcome.seen["killed"] += 1
        self._note_reads(host)
        self._world.kill(host)
        for request in self._requests:
            request.host_killed(host)
        self._world.after(self._rng.random(), lambda: self._world.boot(host))

    def _stop(self, host: Host) -> None:
        self._outcome.seen["stopped"] += 1
        self._world.stop(host)
        incarnation = host.incarnation

        def stalls() -> None:
            if host.stopped and host.incarnation == incarnation:
                for request in self._requests:
                    request.host_stalls(host)

        def resume() -> None:
            if host.stopped and host.incarnation == incarnation:
                self._world.resume(host)

        self._world.after(STALL_S, stalls)
        self._world.after(self._rng.random() ** 2 * 2 * KEEPALIVE_S, resume)

    def _churn(self, host: Host) -> None:
        """Have a host use its pages again: a prompt that nobody else has, and that nobody waits for."""
        self._outcome.seen["churned"] += 1
        prompt = tuple(self._rng.randrange(1, 200) for _ in range(self._rng.randint(*CHURN_TOKENS)))
        job_id = f"churn{self._outcome.seen['churned']}"

        def take(event: Event) -> None:
            if isinstance(event, Failed) and isinstance(event.error, InternalError):
                raise WrongError(f"{job_id}: {event.error}")

        host.routes[job_id] = take
        deadline_at_s = self._world.now_s + CHURN_DEADLINE_S
        sampling = Sampling(max_tokens=2)
        host.handle(Generate(job_id=job_id, prompt=prompt_of(prompt), sampling=sampling, deadline_at_s=deadline_at_s))

    def _lease_prefix(self, host: Host) -> None:
        """Lease what is cached of some prompt, as a third replica does, and give it back or let it expire."""
        order = self._rng.choice(self._requests).order
        ttl_s = self._rng.uniform(0.1, 2.0)

        def leased(lease_id: str) -> None:
            self._outcome.seen["prefix_leased"] += 1
            if self._rng.random() < 0.5:
                release = ReleaseLeases(lease_ids=(lease_id,))
                self._world.on(host, host.incarnation, self._rng.random(), lambda: host.handle(release))

        self._world.call(
            host,
            host,
            host.incarnation,
            lambda call_id: LeasePrefix(
                call_id=call_id, block_keys=prompt_of(order.prompt_ids).block_keys, skip_blocks=0, ttl_s=ttl_s
            ),
            lambda reply: leased(reply.lease.lease_id) if reply is not None and reply.lease is not None else None,
        )

    def _disturb_request(self, request: Request) -> None:
        if self._rng.random() < self._mood.cancel:
            request.end("cancelled")
        elif self._rng.random() < self._mood.reset:
            self._outcome.seen["reset"] += 1
            request.connection_breaks()
        elif self._rng.random() < self._mood.revoke:
            request.lease_ends()

    # ------------------------------------------------------------ the end

    def _settle(self) -> None:
        """Let everybody live, and wait until everything was given back."""
        for host in self._world.hosts.values():
            if host.alive and host.stopped:
                self._world.resume(host)
        start_s = self._world.now_s
        while (kept := self._kept()) or not all(host.alive for host in self._world.hosts.values()):
            if self._world.now_s - start_s > SETTLE_S:
                raise WrongError(f"not given back: {', '.join(kept)}")
            for _ in range(BASELINE_INTERVAL_TICKS):
                self._tick(disturbed=False)
        self._check()
        self._outcome.settled_s = self._world.now_s - start_s
        for host in self._world.hosts.values():
            self._note_reads(host)

    def _kept(self) -> list[str]:
        return [fault for host in self._world.hosts.values() if host.alive for fault in host.idle_faults()]

    def _note_reads(self, host: Host) -> None:
        self._outcome.seen["reads"] += len(host.transfer.reads)
        self._outcome.seen["abandoned"] += len(host.transfer.abandoned)

    # ------------------------------------------------------------ what is drawn

    def _host(self, name: str) -> Host:
        rng, mood, seed = self._rng, self._mood, self._rng.randrange(1 << 32)
        config = EngineConfig(
            engine="mock",
            block_tokens=BLOCK_TOKENS,
            page_tokens=self._page_tokens,
            kv_mib=1,
            chunk_tokens=rng.choice([3, 8, 16]),
            max_sequences=rng.choice([2, 4]),
            queue_jobs=rng.choice([4, 16]),
            pull_timeout_s=rng.choice([0.3, 1.0]),
        )
        return Host(
            name,
            config,
            pages=rng.choice(PAGES) * BLOCK_TOKENS // self._page_tokens,
            clock=self._world.clock,
            network=self._network,
            plan=lambda start: seeded(seed + start, share=mood.reads, delay_polls_max=READ_DELAY_POLLS_MAX),
        )

    def _order(self, number: int) -> Order:
        rng = self._rng
        prompt = draw_prompt(rng)
        sampling = Sampling(max_tokens=rng.randint(1, 16), temperature=rng.choice([0.0, 1.0]), seed=number)
        decoders = list(self._world.hosts)
        rng.shuffle(decoders)
        return Order(
            name=f"r{number}",
            prompt_ids=prompt,
            sampling=sampling,
            expected=expected(prompt, sampling),
            decoders=tuple(decoders),
            prefillers=rng.choice([0, 1, 1, 2, 2]),
            never_local=rng.random() < 0.1,
            prefix_tokens=len(prompt) if rng.random() < 0.5 else 0,
            priority=rng.randrange(-1, 2),
            lease_ttl_s=rng.choice([0.2, 2.0, 5.0, 5.0]),
            deadline_at_s=self._world.now_s + rng.choice([1.0, 5.0, 20.0]),
        )
