"""Which processes make a fleet, and with which flags. Pure but for the search for free ports."""

import dataclasses
import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.config import (
    DECODE_PORT,
    PREFILL_PORT,
    REGISTRY_PORT,
    ROUTER_PORT,
    RegistryConfig,
    ReplicaConfig,
    RouterConfig,
    UpConfig,
    flag_name,
)
from kvrelay.errors import InvalidArgument

PORTS_PER_KIND = DECODE_PORT - PREFILL_PORT
"""Replicas that the documented ports leave room for: those that prefill, and those that only decode."""

PLANNED_FIELDS = frozenset({"port", "registry", "redis_url", "role", "replica_id", "metrics_port"})
"""Fields that differ from child to child: set by the plan, never passed through."""

ANY_ADDRESS = frozenset({"0.0.0.0", "::", "[::]"})  # noqa: S104 - compared with, not bound to
LOOPBACK = "127.0.0.1"


class Kind(enum.StrEnum):
    """What a child process is."""

    STORE = "store"
    REGISTRY = "registry"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


START_STAGES: tuple[frozenset[Kind], ...] = (
    frozenset({Kind.STORE}),
    frozenset({Kind.REGISTRY}),
    # A router becomes ready when replicas have told the registry what they serve: all start together.
    frozenset({Kind.ROUTER, Kind.PREFILL, Kind.DECODE, Kind.BOTH}),
)
DRAIN_STAGES: tuple[frozenset[Kind], ...] = (
    frozenset({Kind.ROUTER}),
    frozenset({Kind.DECODE, Kind.BOTH}),
    frozenset({Kind.PREFILL}),
    frozenset({Kind.REGISTRY}),
    frozenset({Kind.STORE}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """A child process: its name, what it is, its command line, and the address that it is reached under from here."""

    name: str
    kind: Kind
    command: tuple[str, ...]
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a plan depends on beside the operator's wishes.

    Attributes:
        redis_url: where the registry finds its store.
        passed: fields that were given for children, by name; each child gets those it knows.
        cores: cores of this machine, divided among the replicas unless `passed` has threads.
        metrics_port: the router's; the others get the following ones. 0: none.
        free_port: returns a port that nobody listens on, for `ports` "free".
        debug: children print tracebacks.
    """

    redis_url: str
    passed: Mapping[str, Any]
    cores: int
    metrics_port: int = 0
    free_port: Callable[[], int]
    debug: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The processes of a fleet, beside the embedded store."""

    registry: ChildSpec
    router: ChildSpec
    replicas: tuple[ChildSpec, ...]

    @property
    def children(self) -> tuple[ChildSpec, ...]:
        """All of them."""
        return (self.registry, self.router, *self.replicas)


def make_plan(config: UpConfig, around: Surroundings) -> Plan:
    """Plan a fleet.

    Raises:
        InvalidArgument: too few or too many replicas.
    """
    _check(config)
    replicas = _replicas(config)
    default_ports = {"router": ROUTER_PORT, "registry": REGISTRY_PORT} | _replica_ports(config)
    ports = {name: around.free_port() if config.ports == "free" else port for name, port in default_ports.items()}
    child = _Children(ports, around).child
    registry = child("registry", Kind.REGISTRY, RegistryConfig, redis_url=around.redis_url)
    threads = max(1, around.cores // len(replicas))
    return Plan(
        registry=registry,
        router=child("router", Kind.ROUTER, RouterConfig, registry=registry.address),
        replicas=tuple(
            child(
                name, kind, ReplicaConfig, registry=registry.address, role=kind.value, replica_id=name, threads=threads
            )
            for name, kind in replicas.items()
        ),
    )


class _Children:
    """Makes the specs of children that have ports."""

    def __init__(self, ports: Mapping[str, int], around: Surroundings) -> None:
        self._ports = ports
        self._around = around
        first = around.metrics_port
        self._metrics_ports = {name: first + index if first else 0 for index, name in enumerate(ports)}
        bind = str(around.passed.get("bind", LOOPBACK))
        self._host = LOOPBACK if bind in ANY_ADDRESS else bind

    def child(self, name: str, kind: Kind, config: type[Any], **planned: Any) -> ChildSpec:
        known = {field.name for field in dataclasses.fields(config)} - PLANNED_FIELDS
        passed = {field: value for field, value in self._around.passed.items() if field in known}
        flags = {"port": self._ports[name], "metrics_port": self._metrics_ports[name]} | planned | passed
        command = _command(kind, flags, debug=self._around.debug)
        return ChildSpec(name=name, kind=kind, command=command, address=f"{self._host}:{self._ports[name]}")


def _check(config: UpConfig) -> None:
    for field in ("prefill", "decode", "both"):
        if getattr(config, field) < 0:
            raise InvalidArgument(field, "a number of replicas is not negative")
    if not config.prefill + config.both:
        raise InvalidArgument("prefill", "no replica would read prompts; give --prefill or --both")
    if not config.decode + config.both:
        raise InvalidArgument("decode", "no replica would write answers; give --decode or --both")
    if config.ports == "default" and max(config.prefill + config.both, config.decode) > PORTS_PER_KIND:
        raise InvalidArgument("ports", f"the documented ports end at {PORTS_PER_KIND} a kind; give --ports free")


def _replicas(config: UpConfig) -> dict[str, Kind]:
    counts = {Kind.PREFILL: config.prefill, Kind.DECODE: config.decode, Kind.BOTH: config.both}
    return {f"{kind}-{index}": kind for kind, count in counts.items() for index in range(count)}


def _replica_ports(config: UpConfig) -> dict[str, int]:
    first = {Kind.PREFILL: PREFILL_PORT, Kind.DECODE: DECODE_PORT, Kind.BOTH: PREFILL_PORT + config.prefill}
    counts = {Kind.PREFILL: config.prefill, Kind.DECODE: config.decode, Kind.BOTH: config.both}
    return {f"{kind}-{index}": first[kind] + index for kind, count in counts.items() for index in range(count)}


def _command(kind: Kind, flags: Mapping[str, Any], *, debug: bool) -> tuple[str, ...]:
    name = kind.value if kind in {Kind.REGISTRY, Kind.ROUTER} else "replica"
    # -P: a folder named like one of our packages, where the operator happens to stand, is not ours.
    start = (sys.executable, "-P", "-m", "kvrelay.cli.main", *(("--debug",) if debug else ()), name)
    return (*start, *(f"{flag_name(field)}={value}" for field, value in flags.items()))
