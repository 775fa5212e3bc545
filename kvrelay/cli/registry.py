"""`kvrelay registry`."""

import argparse

from kv_registry.worker import main
from kvrelay import config
from kvrelay.config import RegistryConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the registry's flags."""
    config.add_flags(parser, RegistryConfig)


def run(args: argparse.Namespace) -> int:
    """Run a registry until a signal ends it."""
    return main(config.build(RegistryConfig, vars(args)))
