"""`kvrelay router`."""

import argparse

from kvrelay import config
from kvrelay.config import RouterConfig
from router.worker import main


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the router's flags."""
    config.add_flags(parser, RouterConfig)


def run(args: argparse.Namespace) -> int:
    """Run a router until a signal ends it."""
    return main(config.build(RouterConfig, vars(args)))
