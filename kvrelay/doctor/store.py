"""Checks of the registry's store: round trip, version, eviction, memory."""

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from kvrelay.config import RESERVE_DEADLINE_S
from kvrelay.doctor.finding import Finding, fail, ok, warn

PINGS: Final = 50
ANSWER_TIMEOUT_S: Final = 2.0
PINGS_TIMEOUT_S: Final = 10.0
"""For all of them: a store that takes longer is slow enough to say so."""

SLOW_S: Final = RESERVE_DEADLINE_S / 5
"""Routers wait that deadline for a reservation, which is a call to the registry and some of its calls to the store."""

MEMORY_SHARE_MAX: Final = 0.9
"""Of maxmemory: past it the store soon refuses writes."""

POLICY: Final = "noeviction"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What a store told.

    Attributes:
        url: where it is, without its password.
        error: why it did not answer; the rest means nothing then.
        round_trips_s: of PINGs, ascending.
        info: its INFO, by field.
    """

    url: str
    error: str = ""
    round_trips_s: tuple[float, ...] = ()
    info: Mapping[str, Any]


def ask(url: str) -> StoreFacts:
    """Ping a store and ask what it is."""
    shown = without_password(url)
    try:
        client = _client(url)
    except ImportError as error:
        return StoreFacts(url=shown, error=f"no Redis client: {error}", info={})
    except ValueError as error:
        return StoreFacts(url=shown, error=f"no URL of a store: {error}", info={})
    try:
        with client:
            info = client.info()
            return StoreFacts(url=shown, round_trips_s=_ping(client), info=info)
    except Exception as error:  # noqa: BLE001 - whatever the client raises is the finding
        return StoreFacts(url=shown, error=" ".join(f"{error}".split()) or type(error).__name__, info={})


def without_password(url: str) -> str:
    """Return a URL that may be shown."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()


def check_store(facts: StoreFacts) -> Finding:
    """Check that the store answers, and how fast."""
    if facts.error:
        advice = "start Redis or Valkey, or correct --redis-url; meanwhile the fleet serves on, degraded"
        return fail("redis", f"{facts.url}: {facts.error}", advice)
    times = facts.round_trips_s
    p50, p99 = _quantile(times, 0.5), _quantile(times, 0.99)
    pings = f"PING p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms ({len(times)} pings)"
    found = f"{name_of(facts.info)} at {facts.url}: {pings}"
    if p99 > SLOW_S:
        return warn("redis", found, "put it near the registry, on cores of its own; redis-cli --latency, SLOWLOG GET")
    return ok("redis", found)


def check_store_memory(facts: StoreFacts) -> Finding:
    """Check that the store evicts nothing and has memory left."""
    name, info = "redis memory", facts.info
    used, limit, policy = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)), info.get("maxmemory_policy")
    found = f"{used / 1e6:.1f} MB used of {f'{limit / 1e6:.0f} MB' if limit else 'no limit'}, maxmemory-policy {policy}"
    if policy is not None and policy != POLICY:
        return fail(name, found, f"CONFIG SET maxmemory-policy {POLICY}: an evicted key is a replica or a block lost")
    if limit and used > MEMORY_SHARE_MAX * limit:
        return warn(name, found, "raise maxmemory: when it is full the registry can write nothing")
    return ok(name, found)


def name_of(info: Mapping[str, Any]) -> str:
    """Return the store's name and version."""
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', '(version not told)')}"


def _client(url: str) -> Any:
    redis, retry, backoff = (importlib.import_module(name) for name in ("redis", "redis.retry", "redis.backoff"))
    return redis.Redis.from_url(
        url,
        socket_timeout=ANSWER_TIMEOUT_S,
        socket_connect_timeout=ANSWER_TIMEOUT_S,
        # The client's own retries would wait many times that.
        retry=retry.Retry(backoff.NoBackoff(), 0),
        protocol=2,
    )


def _ping(client: Any) -> tuple[float, ...]:
    times: list[float] = []
    end_s = time.monotonic() + PINGS_TIMEOUT_S
    while len(times) < PINGS and (not times or time.monotonic() < end_s):
        started_s = time.perf_counter()
        client.ping()
        times.append(time.perf_counter() - started_s)
    return tuple(sorted(times))


def _quantile(ascending: tuple[float, ...], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
