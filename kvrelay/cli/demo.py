"""`kvrelay demo`: `kvrelay up --disaggregate always --demo` in one word."""

import argparse

from kvrelay.cli import up


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `up`, with its demonstration on."""
    up.add_flags(parser)
    parser.set_defaults(demo=True, disaggregate="always")


def run(args: argparse.Namespace) -> int:
    """Run a fleet, demonstrated."""
    return up.run(args)
