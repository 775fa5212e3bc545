"""`kvrelay health`: for container health checks and scripts."""

import argparse
import asyncio

from kvrelay.up.probes import PROBE_TIMEOUT_S, is_serving


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("address", metavar="HOST:PORT", help="gRPC address of any kvrelay process")
    parser.add_argument(
        "--timeout-s", type=float, default=PROBE_TIMEOUT_S, help="longest wait, s (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the health; return 0 when the process serves, else 1."""
    serving = asyncio.run(is_serving(args.address, timeout_s=args.timeout_s))
    print("serving" if serving else "not serving")
    return 0 if serving else 1
