"""`kvrelay doctor`."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrelay import __version__
from kvrelay.cli.status import PIPED_WIDTH
from kvrelay.cli.target import ADDRESS_VARIABLE, add_target_flags, router_addresses, state_file
from kvrelay.config import ServerConfig, build, env_name
from kvrelay.doctor.examine import Patient, examine
from kvrelay.doctor.finding import Finding, Status
from kvrelay.errors import NotFound
from kvrelay.up.state import FleetRecord

STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIPPED: "dim"}
EXIT_FAILED = 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_target_flags(parser)
    parser.add_argument("--registry", metavar="HOST:PORT", help="registry (default: that of the fleet here)")
    parser.add_argument("--redis-url", metavar="URL", help="the registry's store (default: that of the fleet here)")
    parser.add_argument("--model", default="", help="alias to ask the registry for (default: what the router tells of)")
    parser.add_argument("--bind", help="address that a process here listens on, to check what it would advertise")
    parser.add_argument("--advertise", help="host that it would tell others")


def run(args: argparse.Namespace) -> int:
    """Print what was found; return 1 when something fails."""
    patient = make_patient(args, os.environ)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    findings = _examine(patient, quiet=args.json)
    if args.json:
        print(json.dumps(as_json(findings), indent=2))
    else:
        console.print(make_table(findings))
        console.print(f"kvrelay {__version__}: {summary(findings)}", highlight=False)
    return EXIT_FAILED if failed(findings) else 0


def make_patient(args: argparse.Namespace, env: Mapping[str, str]) -> Patient:
    """Return what to examine: what flags, environment and the state file of the local fleet name."""
    record, why = _record(args, env)
    server = build(ServerConfig, vars(args), env)
    named = args.address or env.get(ADDRESS_VARIABLE)
    return Patient(
        environment=env,
        bind=server.bind,
        advertise=server.advertise,
        routers=tuple(router_addresses(args, env)) if named or record else (),
        registry=args.registry or env.get(env_name("registry")) or (record.registry if record else ""),
        redis_url=args.redis_url or env.get(env_name("redis_url")) or (record.redis_url if record else ""),
        why_no_fleet=why,
        model=args.model,
        record=record,
    )


def failed(findings: Sequence[Finding]) -> bool:
    """Whether something does not work."""
    return any(finding.status is Status.FAIL for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return what is printed for programs."""
    return {
        "kvrelay": __version__,
        "ok": not failed(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def make_table(findings: Sequence[Finding]) -> Table:
    """Return the findings as a table; what to do stands under what was found."""
    table = Table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found")
    for finding in findings:
        found = Text(finding.found, style="dim" if finding.status is Status.SKIPPED else "")
        if finding.advice:
            found.append(f"\n→ {finding.advice}", style="bold")
        table.add_row(finding.check, Text(finding.status.value, style=STYLES[finding.status]), found)
    return table


def summary(findings: Sequence[Finding]) -> str:
    """Say in one line how many findings of each kind there are."""
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    return ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)


def _examine(patient: Patient, *, quiet: bool) -> list[Finding]:
    screen = Console(stderr=True)
    if quiet or not (screen.is_terminal and sys.stdout.isatty()):
        return examine(patient, lambda _: None)
    with screen.status("looking") as status:
        return examine(patient, lambda what: status.update(f"looking at {what}"))


def _record(args: argparse.Namespace, env: Mapping[str, str]) -> tuple[FleetRecord | None, str]:
    """Return the fleet that `kvrelay up` runs here, unless another one is named; or why there is none, if none is."""
    if args.address or env.get(ADDRESS_VARIABLE):
        return None, ""
    state = state_file(args, env)
    try:
        return state.read(), ""
    except NotFound:
        return None, f"no fleet runs here ({state.path}), and none is named (--address, --registry)"
