"""`kvrelay`: finds the command, runs it, and turns errors into one line and an exit code."""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from kvrelay import __version__
from kvrelay.errors import KvrelayError, PeerLost

COMMANDS = {
    "up": "start a fleet on this machine and keep it running",
    "demo": "start a fleet, ask it twice, show what was computed, pulled and cached",
    "chat": "talk to a fleet, or send it one message",
    "generate": "continue a text as it stands, without a chat template",
    "status": "show the replicas of a fleet: state, load, blocks, leases, pages",
    "kill": "kill a replica of the fleet on this machine, to see it survive",
    "doctor": "look for what is wrong with this machine or a fleet, and say what to do",
    "health": "ask a process whether it is healthy; exit code 0 if so",
    "router": "run a router",
    "registry": "run a registry",
    "replica": "run a prefill or decode replica",
    "version": "print the version",
}

SERVICES = frozenset({"router", "registry", "replica"})
"""Long-running: a bug's traceback goes to the log, for nobody can run them again to see it."""

WORKER_MODULES = frozenset({"torch", "nixl", "nixl_cu12", "safetensors"})
"""What the base install does not bring."""

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
"""As shells have it for Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = next((word for word in given if not word.startswith("-")), "")
    debug = "--debug" in given
    try:
        module = importlib.import_module(f"kvrelay.cli.{command}") if command in COMMANDS else None
        args = make_parser(command, module).parse_args(given)
        assert module is not None, "argparse takes known commands only"
        return int(module.run(args))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except Exception as error:  # noqa: BLE001 - the command line's last resort
        if debug or (command in SERVICES and not isinstance(error, KvrelayError)):
            traceback.print_exc()
        print(f"kvrelay: {describe(error)}", file=sys.stderr)
        return EXIT_ERROR


def make_parser(command: str = "", module: ModuleType | None = None) -> argparse.ArgumentParser:
    """Return the parser; flags of `command` come from its module, the other commands have only their summary."""
    parser = argparse.ArgumentParser(
        prog="kvrelay", description="Serves a large language model as a fleet of gRPC microservices."
    )
    parser.add_argument("--debug", action="store_true", help="print tracebacks of errors")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if module is not None and name == command:
            module.add_flags(sub)
    return parser


def describe(error: Exception) -> str:
    """Say in one line what went wrong (a crashed child's last lines follow it)."""
    if isinstance(error, PeerLost):
        return f"{error.message} (kvrelay up starts a fleet, --address names another one, kvrelay doctor looks at it)"
    if isinstance(error, KvrelayError):
        return error.message
    if isinstance(error, OSError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in WORKER_MODULES:
        return f"{error.name} is not installed, and replicas need it; pip install 'kvrelay[worker]'"
    return f"internal error: {type(error).__name__}: {error} (kvrelay --debug … shows where; kvrelay {__version__})"


if __name__ == "__main__":
    sys.exit(main())
