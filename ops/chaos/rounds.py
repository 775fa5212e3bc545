"""Rounds over a real fleet: requests run while a replica is killed, or stopped past every time to live and let go on.

The fleet is two prefill and two decode replicas on the mock engine, with real NIXL, gRPC and Valkey. Every answer must
be the one of a calm engine, or an explicit error; after each round everything must be given back.
"""

import contextlib
import random
import signal
import statistics
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bench.local_fleet import LocalFleet, wait_for
from kvrelay.client import Client
from kvrelay.errors import InternalError, KvrelayError, NotFound
from kvrelay.types import Sampling
from kvrelay.up.policy import CRASH_WINDOW_S, CRASHES_MAX
from kvrelay.up.processes import send_signal
from ops.chaos.calm import expected

FLEET = {
    "prefill": 2,
    "decode": 2,
    "engine": "mock",
    "model": "mock",
    "disaggregate": "always",
    "kv_mib": 192,
    "chunk_tokens": 128,
    "lease_ttl_s": 3,
    "liveness_ttl_s": 2,
    "pull_timeout_s": 2,
    # 0.2 s for 400 tokens of prompt, 5 ms a token, and pulls of 26 MB: every stage is there to be met.
    "mock_profile": "prefill_ms_per_token=0.5,step_ms=5,kv_bytes_per_token=65536",
}
ENV = {"UCX_NET_DEVICES": "lo"}
"""The fleet is on this machine: other interfaces may come and go under it."""
VICTIMS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
STOP_MAX_S = 7.0
"""Longer than the life of a lease, of a pull without progress, of a heartbeat, of a connection without an answer."""
REQUESTS_MAX = 10
BLOWS_MAX = 3
SPREAD_S = 1.5
"""Requests start, and victims are met, within this time of a round's start."""
DEADLINE_S = 30.0
DEADLINE_GRACE_S = 5.0
"""What client, router and this machine may add to a deadline."""
BASELINE_TIMEOUT_S = 90.0
"""Ten times the life of a lease and the start of a replica; the time that it took is told."""
HEAL_TIMEOUT_S = 60.0
"""Ten times the longest memory of a peer that could not be reached."""
PROMPT_FAMILIES = 3
NEW_PROMPT_TOKENS = 100
PROMPT_TOKENS_MAX = 500


@dataclass(frozen=True)
class Ask:
    """A request: what for, when it starts, and when its client goes away."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    start_s: float
    leave_s: float | None


@dataclass(frozen=True)
class Blow:
    """What happens to a replica: killed, or stopped for a while (and then killed, perhaps)."""

    victim: str
    at_s: float
    stop_s: float
    kills: bool


@dataclass
class Tally:
    """What all rounds saw."""

    ended: Counter[str] = field(default_factory=Counter)
    blows: Counter[str] = field(default_factory=Counter)
    baseline_s: list[float] = field(default_factory=list)
    healed_s: list[float] = field(default_factory=list)
    failed: int = 0


def run(seed: int, count: int) -> int:
    """Run rounds and say what they saw; return how many failed."""
    tally, kills = Tally(), Kills()
    start_s = time.monotonic()
    with LocalFleet(dict(FLEET), ENV) as fleet, fleet.client() as client:
        for number in range(count):
            try:
                _round(fleet, client, random.Random(f"{seed}.{number}"), kills, tally)
            except (AssertionError, TimeoutError) as error:
                tally.failed += 1
                print(f"round {number} of seed {seed} FAILED: {error}", flush=True)
            if (number + 1) % 10 == 0:
                print(f"{number + 1} rounds, {tally.failed} failed, {time.monotonic() - start_s:.0f} s", flush=True)
    _tell(tally, count, time.monotonic() - start_s)
    return tally.failed


class Kills:
    """Sees to it that no child dies so often that `kvrelay up` takes it for a crash loop."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {name: deque(maxlen=CRASHES_MAX - 1) for name in VICTIMS}

    def allowed(self, victim: str) -> bool:
        """Tell whether the victim may die now."""
        times = self._times[victim]
        return len(times) < CRASHES_MAX - 1 or time.monotonic() - times[0] > CRASH_WINDOW_S

    def note(self, victim: str) -> None:
        """Note a death."""
        self._times[victim].append(time.monotonic())


def _round(fleet: LocalFleet, client: Client, rng: random.Random, kills: Kills, tally: Tally) -> None:
    asks = [_draw_ask(rng) for _ in range(rng.randint(2, REQUESTS_MAX))]
    blows = [_draw_blow(rng, victim, kills) for victim in rng.sample(VICTIMS, rng.randint(1, BLOWS_MAX))]
    with ThreadPoolExecutor(len(asks) + len(blows)) as pool:
        struck = [pool.submit(_strike, fleet, blow, kills) for blow in blows]
        futures = [pool.submit(_ask, client, ask) for ask in asks]
        tally.ended.update(future.result(timeout=DEADLINE_S + 2 * DEADLINE_GRACE_S) for future in futures)
        tally.blows.update(future.result(timeout=STOP_MAX_S + DEADLINE_S) for future in struck)
    start_s = time.monotonic()
    wait_for("counts to return to the baseline", lambda: not _kept(fleet), timeout_s=BASELINE_TIMEOUT_S)
    tally.baseline_s.append(time.monotonic() - start_s)
    start_s = time.monotonic()
    wait_for("pulls to work again", lambda: _pulls(client, rng), timeout_s=HEAL_TIMEOUT_S)
    tally.healed_s.append(time.monotonic() - start_s)


def _ask(client: Client, ask: Ask) -> str:
    """Ask, and say how it ended.

    Raises:
        AssertionError: the answer is wrong, late, or an error of the engine.
    """
    sampling = Sampling(max_tokens=ask.max_tokens)
    wanted = expected(ask.prompt_ids, sampling)
    threading.Event().wait(ask.start_s)
    start_s = time.monotonic()
    ids: list[int] = []
    ended = "answered"
    try:
        with client.stream_generate(
            list(ask.prompt_ids), sampling=sampling, deadline_s=DEADLINE_S, return_ids=True
        ) as stream:
            for part in stream:
                ids += getattr(part, "ids", ())
                if ask.leave_s is not None and time.monotonic() - start_s > ask.leave_s:
                    ended = "left"
                    break
    except KvrelayError as error:
        ended = type(error).__name__
    assert ended != InternalError.__name__, "the engine met wrong bytes"
    assert tuple(ids) == wanted[: len(ids)], f"told {ids}, expected {wanted}"
    assert ended != "answered" or len(ids) == len(wanted), f"an answer of {len(ids)} tokens instead of {len(wanted)}"
    took_s = time.monotonic() - start_s
    assert took_s < DEADLINE_S + DEADLINE_GRACE_S, f"{ended} after {took_s:.1f} s"
    return ended


def _pulls(client: Client, rng: random.Random) -> bool:
    """Ask something new, and tell whether its prompt came from a prefill replica."""
    prompt = [1 + rng.randrange(256) for _ in range(NEW_PROMPT_TOKENS)]
    return client.generate(prompt, max_tokens=2, deadline_s=DEADLINE_S).usage.pulled_bytes > 0


def _strike(fleet: LocalFleet, blow: Blow, kills: Kills) -> str:
    """Do it to the victim, and say what was done."""
    threading.Event().wait(blow.at_s)
    child = fleet.child(blow.victim)
    kind = blow.victim.partition("-")[0]
    with contextlib.suppress(NotFound):  # it is starting again at this moment
        if blow.stop_s:
            send_signal(child.pid, child.start_ticks, signal.SIGSTOP)
            threading.Event().wait(blow.stop_s)
        if blow.kills:
            kills.note(blow.victim)
            send_signal(child.pid, child.start_ticks, signal.SIGKILL)
        else:
            send_signal(child.pid, child.start_ticks, signal.SIGCONT)
    what = "stopped and killed" if blow.stop_s and blow.kills else "killed" if blow.kills else "stopped"
    return f"{kind} {what}"


def _kept(fleet: LocalFleet) -> list[str]:
    """Return what is not at the baseline."""
    replicas = fleet.replicas()
    if len(replicas) != len(VICTIMS):
        return ["replicas are missing"]
    kept = []
    for name, status in replicas.items():
        counts = (status.running, status.waiting, status.leases, status.pages_quarantined, status.decode_sequences)
        if status.state != "ready" or any(counts) or status.pages_free != status.pages_total:
            kept.append(name)
    return kept


# ------------------------------------------------------------ what is drawn


def _draw_ask(rng: random.Random) -> Ask:
    family = rng.randrange(PROMPT_FAMILIES)
    shared = [1 + (family * 7919 + index * 31) % 256 for index in range(rng.randrange(PROMPT_TOKENS_MAX))]
    own = [1 + rng.randrange(256) for _ in range(rng.randint(1, 100))]
    return Ask(
        prompt_ids=(*shared, *own),
        max_tokens=rng.randint(1, 100),
        start_s=rng.random() * SPREAD_S,
        leave_s=rng.random() if rng.random() < 0.15 else None,
    )


def _draw_blow(rng: random.Random, victim: str, kills: Kills) -> Blow:
    wanted = rng.choice(["kill", "stop", "stop and kill"])
    at_s, stop_s = rng.random() * SPREAD_S, 0.05 + rng.random() ** 2 * STOP_MAX_S
    if wanted == "stop" or not kills.allowed(victim):
        return Blow(victim, at_s, stop_s, kills=False)
    return Blow(victim, at_s, 0.0 if wanted == "kill" else stop_s, kills=True)


def _tell(tally: Tally, count: int, took_s: float) -> None:
    print(f"{count} rounds, {tally.failed} failed, {took_s:.0f} s")
    for what, counter in (("requests", tally.ended), ("blows", tally.blows)):
        print(f"  {what}: {', '.join(f'{number} {name}' for name, number in counter.most_common())}")
    for what, samples in (("back to the baseline", tally.baseline_s), ("pulling again", tally.healed_s)):
        if samples:
            print(f"  {what} after {statistics.median(samples):.1f} s in the median, {max(samples):.1f} s at most")
