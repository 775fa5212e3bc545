"""`kvrelay version`."""

import argparse

from kvrelay import __version__


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Print the version."""
    del args
    print(f"kvrelay {__version__}")
    return 0
