"""`kvrelay chat`: one message, or a conversation."""

import argparse
import contextlib
import sys
import uuid

from kvrelay.cli.asking import add_request_flags, request_options, show, show_stats
from kvrelay.cli.target import router_addresses
from kvrelay.client import Client, Message, Options
from kvrelay.errors import KvrelayError

PROMPT = "you> "


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "message", nargs="?", help="one message; without it a conversation begins, - reads it from stdin"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_request_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer to one message, or hold a conversation."""
    with Client(router_addresses(args)) as client:
        conversation = Conversation(client, request_options(args), system=args.system, stats=args.stats)
        if args.message is not None:
            conversation.say(sys.stdin.read() if args.message == "-" else args.message)
            return 0
        return _converse(conversation)


class Conversation:
    """Messages so far; all of them go to the replica that holds their KV, by one session name."""

    def __init__(self, client: Client, options: Options, *, system: str | None, stats: bool) -> None:
        self._client = client
        self._options: Options = {**options, "session": uuid.uuid4().hex}
        self._messages = [Message("system", system)] if system else []
        self._stats = stats

    def say(self, text: str) -> None:
        """Send a message and print the answer as it arrives; both join the conversation when the answer is whole."""
        asked = [*self._messages, Message("user", text)]
        with self._client.stream_chat(asked, **self._options) as stream:
            show(stream)
            self._messages = [*asked, Message("assistant", stream.answer.text)]
            if self._stats:
                show_stats(stream.answer)


def _converse(conversation: Conversation) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - importing it gives `input` line editing; not on every platform
    print("Ctrl-C stops an answer, Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            text = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not text.strip():
            continue
        try:
            conversation.say(text)
        except KeyboardInterrupt:
            print()
        except KvrelayError as error:
            print(f"\nkvrelay: {error.message}", file=sys.stderr)
