"""Runs the checks: looks, then judges. Nothing that is missing or broken here ends the examination."""

import asyncio
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvrelay.client import FleetStatus
from kvrelay.config import DEFAULT_MODEL, EngineConfig
from kvrelay.doctor import fleet, machine, network, nixl, rdma, software, store, ucx
from kvrelay.doctor.finding import Finding, skipped, warn
from kvrelay.doctor.probe import run_probe
from kvrelay.up.plan import Kind
from kvrelay.up.probes import SERVING, ask_health
from kvrelay.up.state import ChildRecord, FleetRecord

REPLICA_KINDS: Final = frozenset({Kind.PREFILL.value, Kind.DECODE.value, Kind.BOTH.value})

NO_REGISTRY: Final = "none is named (--registry)"

Tell = Callable[[str], None]
"""Takes a word for what is being looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What to examine beside this machine.

    Attributes:
        environment: environment variables.
        bind, advertise: flags of a process that is or will be started here.
        routers, registry, redis_url: of a fleet; empty: none.
        why_no_fleet: why there is none; empty when one is named.
        model: alias to ask the registry for; empty: those that the router tells of.
        record: the fleet that `kvrelay up` runs here, if the fleet is that one.
    """

    environment: Mapping[str, str]
    bind: str
    advertise: str
    routers: tuple[str, ...] = ()
    registry: str = ""
    redis_url: str = ""
    why_no_fleet: str = ""
    model: str = ""
    record: FleetRecord | None = None

    @property
    def replicas(self) -> tuple[ChildRecord, ...]:
        """The replicas that `kvrelay up` runs here."""
        return tuple(child for child in self.record.children if child.kind in REPLICA_KINDS) if self.record else ()


def examine(patient: Patient, tell: Tell) -> list[Finding]:
    """Run all checks; `tell` hears what is being looked at."""
    notes = Notes()
    tell("packages")
    _examine_software(notes)
    tell("what a replica loads")
    _examine_loaded(patient, notes)
    tell("READ bandwidth")
    with notes.guard("nixl bandwidth"):
        notes.add(_bandwidth(patient, notes))
    tell("this machine")
    _examine_machine(patient, notes)
    tell("store")
    _examine_store(patient, notes)
    tell("fleet")
    _examine_fleet(patient, notes)
    return notes.findings


@dataclass(slots=True)
class Notes:
    """Findings so far."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, *findings: Finding) -> None:
        """Note findings."""
        self.findings += findings

    @contextmanager
    def guard(self, *checks: str) -> Iterator[None]:
        """Turn an unexpected error inside into a finding of each check named."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a check that breaks must not take the others with it
            found = " ".join(f"this check broke: {type(error).__name__}: {error}".split())
            self.add(*(warn(check, found, "report it as a bug of kvrelay") for check in checks))


def _examine_software(notes: Notes) -> None:
    with notes.guard("python"):
        notes.add(software.check_python(platform.python_version(), software.supported_python()))
    with notes.guard("packages"):
        notes.add(software.check_packages(software.requirements(), software.version_of))
    with notes.guard("worker packages"):
        notes.add(software.check_worker_packages(software.requirements("worker"), software.version_of))


def _examine_loaded(patient: Patient, notes: Notes) -> None:
    with notes.guard("torch", "flash-attn", "nixl", "ucx libraries"):
        loaded = run_probe("loaded")
        notes.add(
            software.check_torch(loaded, gpu=software.has_gpu()),
            software.check_flash_attn(loaded),
            nixl.check_nixl(loaded),
            nixl.check_ucx_libraries(loaded, _libraries(patient.replicas)),
        )


def _bandwidth(patient: Patient, notes: Notes) -> Finding:
    works = any(finding.check == "nixl" and not finding.advice for finding in notes.findings)
    if not works:
        return skipped("nixl bandwidth", "NIXL does not work here; see nixl")
    return nixl.check_bandwidth(run_probe("bandwidth", environment=nixl.MEASURING), patient.environment)


def _examine_machine(patient: Patient, notes: Notes) -> None:
    environment = patient.environment
    with notes.guard("rdma", "memlock", "peermem", "nics"):
        ports, gpu = rdma.read_ports(), software.has_gpu()
        may_lock = machine.has_capability(rdma.CAP_IPC_LOCK)
        module = any(path.exists() for path in rdma.PEER_MEMORY_MODULES)
        devices = sorted({port.device for port in ports})
        notes.add(
            rdma.check_rdma(ports, environment, verbs=rdma.VERBS.exists()),
            rdma.check_locked_memory(
                ports, rdma.locked_memory_limit(), may_lock=may_lock, pool_mib=EngineConfig.kv_mib
            ),
            rdma.check_peer_memory(ports, gpu=gpu, module=module),
            network.check_nics(network.read_nics(), environment, devices),
        )
    with notes.guard("shared memory"):
        notes.add(machine.check_shared_memory(machine.shared_memory_free()))
    with notes.guard("open files"):
        notes.add(machine.check_open_files(machine.open_files_limit()))
    with notes.guard("cma"):
        notes.add(machine.check_cma(machine.read_isolation(environment)))
    with notes.guard("cores"):
        notes.add(machine.check_cores(machine.cores(), machine.quota_cores(), _threads(patient)))
    with notes.guard("advertise"):
        notes.add(network.check_advertise(patient.bind, patient.advertise))


def _examine_store(patient: Patient, notes: Notes) -> None:
    if not patient.redis_url:
        reason = patient.why_no_fleet or "none is named (--redis-url)"
        notes.add(*(skipped(check, reason) for check in ("redis", "redis memory")))
        return
    with notes.guard("redis", "redis memory"):
        facts = store.ask(patient.redis_url)
        notes.add(store.check_store(facts))
        notes.add(skipped("redis memory", "see redis") if facts.error else store.check_store_memory(facts))


def _examine_fleet(patient: Patient, notes: Notes) -> None:
    checks = ("router", "registry", "replicas", "addresses", "heartbeats", "skew")
    if not patient.routers and not patient.registry:
        notes.add(*(skipped(check, patient.why_no_fleet) for check in checks))
        return
    with notes.guard(*checks):
        notes.add(*asyncio.run(_fleet_findings(patient)))


async def _fleet_findings(patient: Patient) -> list[Finding]:
    told: FleetStatus | str = await fleet.ask_router(patient.routers) if patient.routers else ""
    models = {patient.model} if patient.model else _models(told)
    heard = health = None
    if patient.registry:
        health = await ask_health(patient.registry, timeout_s=fleet.ANSWER_TIMEOUT_S)
        heard = await fleet.listen(patient.registry, models) if health == SERVING else fleet.Heard()
    known = _known(told, heard)
    started = {child.name: (child.kind, child.address) for child in patient.replicas}
    everyone = dict(sorted((started | known).items()))
    healths = await fleet.ask_all({name: address for name, (_, address) in everyone.items()})
    sights = [_sight(name, *everyone[name], told, healths[name]) for name in everyone]
    addresses = {name: address for name, (_, address) in sorted(known.items())}
    refused = await _refused(addresses)
    return [
        fleet.check_router(told) if patient.routers else skipped("router", "none is named (--address)"),
        fleet.check_registry(health, heard, models) if health and heard else skipped("registry", NO_REGISTRY),
        *fleet.check_replicas(sights),
        network.check_addresses(addresses, refused) if addresses else skipped("addresses", "no replica is known"),
        fleet.check_heartbeats(told, heard),
        fleet.check_skew(heard.members if heard else {}),
    ]


def _sight(name: str, role: str, address: str, told: FleetStatus | str, health: str) -> fleet.Sight:
    state = ""
    if not isinstance(told, str):
        states = {replica.peer.replica_id: replica.state for replica in told.replicas}
        state = states.get(name, fleet.UNKNOWN)
    return fleet.Sight(name=name, where=f"{role} at {address}", state=state, health=health)


def _models(told: FleetStatus | str) -> set[str]:
    """Return the models to ask the registry for: it answers for one that is named only."""
    known = set() if isinstance(told, str) else {replica.model for replica in told.replicas}
    return known or {DEFAULT_MODEL}


def _known(told: FleetStatus | str, heard: fleet.Heard | None) -> dict[str, tuple[str, str]]:
    """Return role and address of the replicas that router or registry know, by id."""
    entries = [] if isinstance(told, str) else [(each.peer, each.role) for each in told.replicas]
    entries += [(replica.peer, replica.role) for replica in heard.members.values()] if heard else []
    return {peer.replica_id: (role.value, peer.address) for peer, role in entries}


async def _refused(addresses: Mapping[str, str]) -> dict[str, str]:
    told = await asyncio.gather(*(network.connect(where) for where in addresses.values()))
    return {name: why for name, why in zip(addresses, told, strict=True) if why}


def _libraries(replicas: Sequence[ChildRecord]) -> dict[str, list[str]]:
    return {child.name: ucx.libraries_in(_proc(child, "maps")) for child in replicas}


def _threads(patient: Patient) -> dict[str, int | None]:
    if not patient.replicas:
        return {"a replica": machine.threads_of((), patient.environment)}
    commands = {child.name: _proc(child, "cmdline").split("\0") for child in patient.replicas}
    return {name: machine.threads_of(command, patient.environment) for name, command in commands.items()}


def _proc(child: ChildRecord, file: str) -> str:
    """Return a file of /proc about a child; empty when it has gone or is not ours to look at."""
    try:
        return Path(f"/proc/{child.pid}/{file}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
