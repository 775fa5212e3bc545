"""Which fleet a command talks to."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from kvrelay.client.aio import DEFAULT_ADDRESS
from kvrelay.config import UpConfig
from kvrelay.errors import NotFound
from kvrelay.up.state import StateFile

ADDRESS_VARIABLE = "KVRELAY_ADDRESS"
STATE_DIR_VARIABLE = "KVRELAY_STATE_DIR"


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a fleet."""
    parser.add_argument(
        "--address",
        metavar="HOST:PORT[,…]",
        help=f"router, or several equal ones (default: {ADDRESS_VARIABLE}, else the fleet that `kvrelay up` runs here, "
        f"else {DEFAULT_ADDRESS})",
    )
    add_state_dir_flag(parser)


def add_state_dir_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the state directory of a local fleet."""
    parser.add_argument("--state-dir", help=f"state directory of `kvrelay up` (default: {UpConfig.state_dir!r})")


def state_file(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> StateFile:
    """Return the state file of the local fleet."""
    env = os.environ if env is None else env
    return StateFile(Path(args.state_dir or env.get(STATE_DIR_VARIABLE) or UpConfig.state_dir))


def router_addresses(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> list[str]:
    """Return the routers to talk to.

    Raises:
        FailedPrecondition: the state file is not one of ours.
    """
    env = os.environ if env is None else env
    given = args.address or env.get(ADDRESS_VARIABLE)
    if given:
        return [address.strip() for address in given.split(",")]
    try:
        return [state_file(args, env).read().router]
    except NotFound:
        return [DEFAULT_ADDRESS]
