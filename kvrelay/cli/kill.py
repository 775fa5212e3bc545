"""`kvrelay kill`: what a power cut does to one process, for demonstrations."""

import argparse
import signal

from kvrelay.cli.target import add_state_dir_flag, state_file
from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.up.processes import send_signal


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "name", metavar="REPLICA", help="a process of the local fleet, such as prefill-0 (see fleet.json)"
    )
    parser.add_argument("--signal", default="KILL", help="signal to send, such as TERM or STOP (default: KILL)")
    add_state_dir_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Send the signal to the process that `kvrelay up` started, and to no other."""
    number = _signal(args.signal)
    fleet = state_file(args).read()
    child = next((child for child in fleet.children if child.name == args.name), None)
    if child is None:
        raise NotFound(f"no {args.name} here; there are {', '.join(child.name for child in fleet.children)}")
    send_signal(child.pid, child.start_ticks, number)
    print(f"sent {number.name} to {child.name} (process {child.pid})")
    return 0


def _signal(name: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError as error:
        raise InvalidArgument("signal", f"{name} is no signal of this system") from error
