"""`kvrelay health`: for container health checks and scripts."""

import argparse
import asyncio

from kvrelay.up.probes import PROBE_TIMEOUT_S, SERVING, ask_health


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("address", metavar="HOST:PORT", help="gRPC address of any kvrelay process")
    parser.add_argument(
        "--timeout-s", type=float, default=PROBE_TIMEOUT_S, help="longest wait, s (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the health; return 0 when the process serves, else 1."""
    health = asyncio.run(ask_health(args.address, timeout_s=args.timeout_s))
    print(health)
    return 0 if health == SERVING else 1
