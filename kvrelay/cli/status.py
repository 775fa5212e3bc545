"""`kvrelay status`."""

import argparse
import dataclasses
import json

from rich.console import Console
from rich.table import Table

from kvrelay.cli.target import add_target_flags, router_addresses
from kvrelay.client import Client, FleetStatus, ReplicaStatus

PIPED_WIDTH = 200
"""Columns when the output is no terminal: nothing is cut off."""

STATE_STYLES = {"ready": "green", "draining": "yellow", "stalled": "red", "lost": "red"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_target_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the fleet's state."""
    with Client(router_addresses(args)) as client:
        status = client.status()
    if args.json:
        print(json.dumps(dataclasses.asdict(status), indent=2))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(
        f"fleet {status.state}: policy {status.policy}, disaggregate {status.disaggregate}, "
        f"blocks of {status.block_tokens} tokens",
        highlight=False,
    )
    console.print(make_table(status))
    return 0


def make_table(status: FleetStatus) -> Table:
    """Return the replicas as a table."""
    table = Table(box=None, pad_edge=False)
    table.add_column("replica", no_wrap=True)
    for name in ("role", "state", "address"):
        table.add_column(name, no_wrap=True)
    for name in ("prefill load", "sequences", "running", "waiting", "blocks", "pages free", "leases", "heartbeat"):
        table.add_column(name, justify="right")
    for replica in status.replicas:
        table.add_row(*_row(replica))
    return table


def _row(replica: ReplicaStatus) -> tuple[str, ...]:
    style = STATE_STYLES.get(replica.state, "default")
    quarantined = f" ({replica.pages_quarantined} quarantined)" if replica.pages_quarantined else ""
    return (
        replica.peer.replica_id,
        replica.role,
        f"[{style}]{replica.state}[/{style}]",
        replica.peer.address,
        f"{replica.prefill_load_s:.2f} s",
        str(replica.decode_sequences),
        str(replica.running),
        str(replica.waiting),
        str(replica.blocks),
        f"{replica.pages_free}/{replica.pages_total}{quarantined}",
        str(replica.leases),
        f"{replica.heartbeat_age_s:.1f} s ago",
    )
