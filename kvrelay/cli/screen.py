"""What `kvrelay up` shows: its own words, and the children's lines under their names."""

import zlib

from rich.console import Console
from rich.text import Text

OWN_NAME = "up"
NAME_WIDTH = 10
COLOURS = ("cyan", "magenta", "blue", "yellow", "green", "bright_cyan", "bright_magenta", "bright_blue")

MOOT = "Memory overcommit must be enabled"
"""The embedded store warns so at each start, for the sake of saving and replicating, which it never does."""


class LogScreen:
    """Prints to stderr; answers and the ready line have stdout for themselves."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)

    def say(self, line: str) -> None:
        """Tell the operator something."""
        self._console.print(self._prefix(OWN_NAME, "bold"), line, sep="")

    def log(self, name: str, line: str) -> None:
        """Show a line that a child printed."""
        if MOOT in line:
            return
        # A stable hash: a child keeps its colour from start to start.
        colour = COLOURS[zlib.crc32(name.encode()) % len(COLOURS)]
        self._console.print(self._prefix(name, colour), line, sep="")

    def _prefix(self, name: str, style: str) -> Text:
        return Text(f"{name:<{NAME_WIDTH}} | ", style=style)
