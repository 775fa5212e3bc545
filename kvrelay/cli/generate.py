"""`kvrelay generate`."""

import argparse
import sys

from kvrelay.cli.asking import add_request_flags, request_options, show, show_stats
from kvrelay.cli.target import router_addresses
from kvrelay.client import Client


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("text", help="text to continue, taken as it is; - reads it from stdin")
    add_request_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the continuation as it arrives."""
    text = sys.stdin.read() if args.text == "-" else args.text
    with Client(router_addresses(args)) as client, client.stream_generate(text, **request_options(args)) as stream:
        show(stream)
        if args.stats:
            show_stats(stream.answer)
    return 0
