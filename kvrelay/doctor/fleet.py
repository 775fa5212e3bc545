"""Checks of a running fleet, from what its router, its registry and its replicas tell."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from kvrelay.client import AsyncClient, FleetStatus
from kvrelay.config import HEARTBEAT_INTERVAL_S, LIVENESS_TTL_S
from kvrelay.directory import CaughtUp, ReplicaBeat, ReplicaGone, ReplicaSeen
from kvrelay.doctor.finding import Finding, fail, ok, skipped, warn
from kvrelay.errors import KvrelayError
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.registry_client import RegistryClient
from kvrelay.types import PROTOCOL_MAJOR, PROTOCOL_MINOR, Replica
from kvrelay.up.probes import NOT_SERVING, SERVING, ask_health

ANSWER_TIMEOUT_S: Final = 3.0
"""For a health check or a question to a router: a loaded laptop answers in far less."""

LISTEN_S: Final = 2 * LIVENESS_TTL_S
"""Longest time to wait for a heartbeat of each replica; ends as soon as all have come."""

LATE_S: Final = LIVENESS_TTL_S / 2
"""A replica whose last heartbeat is older is half way to being given up."""

UNKNOWN: Final = "unknown"

SAME_IN_A_FLEET: Final = (
    "model_fingerprint",
    "tokenizer_fingerprint",
    "block_tokens",
    "key_version",
    "protocol_major",
    "protocol_minor",
)
"""Fields of a replica's identity that must agree before two replicas share blocks, or should (the minor version)."""

SAME_LAYOUT: Final = ("layers", "kv_heads", "head_dim", "dtype", "page_tokens", "page_bytes", "axes")


@dataclass(slots=True)
class Heard:
    """What the registry told while it was listened to.

    Attributes:
        members: replicas by id.
        beating: ids of those whose heartbeat came.
        error: why it broke off; empty when it did not.
        caught_up: whether it told all that there is.
        seconds: how long it was listened to.
    """

    members: dict[str, Replica] = field(default_factory=dict)
    beating: set[str] = field(default_factory=set)
    error: str = ""
    caught_up: bool = False
    seconds: float = 0.0

    @property
    def silent(self) -> list[str]:
        """Ids of the replicas whose heartbeat did not come."""
        return sorted(set(self.members) - self.beating)


async def ask_all(addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the health of several processes, by name."""
    told = await asyncio.gather(*(ask_health(address, timeout_s=ANSWER_TIMEOUT_S) for address in addresses.values()))
    return dict(zip(addresses, told, strict=True))


async def ask_router(addresses: Sequence[str]) -> FleetStatus | str:
    """Return what a router knows of the fleet, or why none answered."""
    try:
        async with AsyncClient(addresses) as client:
            return await client.status(deadline_s=ANSWER_TIMEOUT_S)
    except KvrelayError as error:
        return error.message


async def listen(registry: str, models: Iterable[str], timeout_s: float = LISTEN_S) -> Heard:
    """Follow the directory of some models until every replica's heartbeat has come.

    By whether one comes, not by how old it says it is: clocks play no part.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    every = await asyncio.gather(*(_listen_to(registry, model, timeout_s) for model in models))
    together = Heard(caught_up=all(each.caught_up for each in every), seconds=loop.time() - started_s)
    for each in every:
        together.members |= each.members
        together.beating |= each.beating
        together.error = together.error or each.error
    return together


async def _listen_to(registry: str, model: str, timeout_s: float) -> Heard:
    heard = Heard()
    try:
        async with (
            asyncio.timeout(timeout_s),
            open_channel(registry) as channel,
            aclosing(RegistryClient(channel).watch(model)) as events,
        ):
            async for watched in events:
                _note(heard, watched.event)
                if heard.caught_up and not heard.silent:
                    break
    except TimeoutError:
        if not heard.caught_up:
            heard.error = f"no answer within {timeout_s:g} s"
    except KvrelayError as error:
        heard.error = error.message
    return heard


def _note(heard: Heard, event: object) -> None:
    match event:
        case ReplicaSeen(replica):
            heard.members[replica.peer.replica_id] = replica
        case ReplicaGone(peer):
            heard.members.pop(peer.replica_id, None)
        case ReplicaBeat(peer) if heard.caught_up:
            heard.beating.add(peer.replica_id)
        case CaughtUp():
            heard.caught_up = True


def check_router(told: FleetStatus | str) -> Finding:
    """Check that a router answers and is in order."""
    if isinstance(told, str):
        return fail("router", told, "kvrelay up starts a fleet; --address names the router of another one")
    found = (
        f"{told.state}; policy {told.policy}, disaggregate {told.disaggregate}, blocks of {told.block_tokens} tokens"
    )
    if told.state == "degraded":
        return warn("router", found, "the router serves by what it knew last: see registry and redis")
    if told.state != "ready":
        return warn("router", found, "wait until it has caught up with the directory; if it stays, see registry")
    return ok("router", found)


def check_registry(health: str, heard: Heard, models: Iterable[str]) -> Finding:
    """Check that the registry serves and tells its directory of the models that were asked for."""
    if health not in {SERVING, NOT_SERVING}:
        return fail("registry", health, "start kvrelay registry, or correct --registry; the fleet serves on, degraded")
    if health != SERVING:
        return fail("registry", health, "it cannot reach its store: see redis, and --redis-url of the registry")
    if heard.error:
        return fail("registry", f"{health}, but its directory breaks off: {heard.error}", "see the registry's log")
    if not heard.members:
        advice = "start replicas with this --registry, or name what they serve: --model ALIAS"
        return warn("registry", f"{health}; no replica of {', '.join(models)} in its directory", advice)
    return ok("registry", f"{health}; {len(heard.members)} replicas in its directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A replica as router, registry and its own process show it.

    Attributes:
        name: its id.
        where: role and advertised address, for people.
        state: what the router calls it; "unknown" when the router does not know it, empty when no router was asked.
        health: what its process answered.
    """

    name: str
    where: str
    state: str
    health: str


def check_replicas(sights: Sequence[Sight]) -> list[Finding]:
    """Check each replica's state as the router sees it, and its health through its advertised address."""
    if not sights:
        return [fail("replicas", "none is known", "start kvrelay replica with --registry of this fleet")]
    return [_replica(sight) for sight in sights]


def _replica(sight: Sight) -> Finding:
    name, state = "replicas", sight.state
    told = f"{state} to the router" if state == UNKNOWN else state
    found = f"{sight.name}, {sight.where}: " + ", ".join(word for word in (told, sight.health) if word)
    if state == "stalled":
        return fail(name, found, "it has work and takes no step: see its log; restart it if it stays")
    if state == "draining":
        return warn(name, found, "it ends when its streams have; start another one if that was not meant")
    if sight.health == NOT_SERVING:
        return fail(name, found, "its own check fails: see its log")
    if sight.health != SERVING or state == "lost":
        return fail(name, found, "see whether it runs (a stopped process answers nothing), its log, and addresses")
    if state == UNKNOWN:
        return fail(name, found, "it runs and has not entered: see its --registry and its log")
    return ok(name, found)


def check_heartbeats(told: FleetStatus | str, heard: Heard | None) -> Finding:
    """Check that heartbeats arrive: at the registry while it was listened to, at the router by their age."""
    name = "heartbeats"
    ages = {} if isinstance(told, str) else {each.peer.replica_id: each.heartbeat_age_s for each in told.replicas}
    if heard is not None and heard.caught_up and heard.silent:
        found = f"none of {', '.join(heard.silent)} within {heard.seconds:.1f} s"
        return fail(name, found, "see whether it runs and reaches the registry (its --registry), and its log")
    late = {each: age for each, age in ages.items() if age > LATE_S}
    if late:
        found = ", ".join(f"{each} {age:.1f} s ago" for each, age in late.items())
        through = heard is None or heard.caught_up
        advice = (
            "see cores: a machine with too much to do beats late" if through else "see registry: they go through it"
        )
        return warn(name, f"late: {found}", advice)
    if heard is not None and heard.caught_up and heard.members:
        oldest = f"; oldest at the router {max(ages.values()):.1f} s" if ages else ""
        return ok(name, f"all {len(heard.members)} within {heard.seconds:.1f} s{oldest}")
    if ages:
        return ok(name, f"oldest {max(ages.values()):.1f} s (sent every {HEARTBEAT_INTERVAL_S:g} s)")
    return skipped(name, "neither router nor registry told of any replica")


def check_skew(members: Mapping[str, Replica]) -> Finding:
    """Check that replicas of one model agree with each other, and that this program speaks their protocol."""
    name = "skew"
    if not members:
        return skipped(name, "the registry told of no replica")
    for model in sorted({each.identity.model for each in members.values()}):
        differing = _differing([each for each in members.values() if each.identity.model == model])
        if differing:
            return warn(
                name, f"{model}: {differing}", "run one version with equal flags and weights in the whole fleet"
            )
    own = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    spoken = sorted({(each.identity.protocol_major, each.identity.protocol_minor) for each in members.values()})
    if spoken != [own]:
        versions = ", ".join(f"{major}.{minor}" for major, minor in spoken)
        found = f"the fleet speaks protocol {versions}, this program {own[0]}.{own[1]}"
        return warn(name, found, "use the kvrelay that the fleet runs")
    return ok(name, f"{len(members)} replicas agree: protocol {own[0]}.{own[1]}, weights, tokenizer, blocks, pages")


def _differing(replicas: Sequence[Replica]) -> str:
    """Name the first field that differs, and who has which value; empty when all agree."""
    parts = [("identity", each) for each in SAME_IN_A_FLEET] + [("layout", each) for each in SAME_LAYOUT]
    for part, each in parts:
        held: dict[str, list[str]] = {}
        for replica in replicas:
            held.setdefault(str(getattr(getattr(replica, part), each)), []).append(replica.peer.replica_id)
        if len(held) > 1:
            return f"{each} differs: " + "; ".join(f"{value} on {', '.join(ids)}" for value, ids in held.items())
    return ""
