"""What `kvrelay up` shows: its own words, and the children's lines under their names."""

import zlib
from typing import Final

from rich.console import Console
from rich.text import Text

from kvrelay.up.lines import Line, as_text

OWN_NAME = "up"
NAME_WIDTH = 10
COLOURS = ("cyan", "magenta", "blue", "yellow", "green", "bright_cyan", "bright_magenta", "bright_blue")
LEVEL_STYLES = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}

MOOT: Final = (
    "Memory overcommit must be enabled",
    "Received SIGTERM scheduling shutdown",
    "is now ready to exit, bye bye",
)
"""What the embedded store says at each start, for the sake of saving and replicating, which it never does, and at each
end, which is ours to tell."""


class LogScreen:
    """Prints to stderr; answers and the ready line have stdout for themselves.

    Args:
        as_json: show the children's log lines as they are.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)

    def say(self, line: str) -> None:
        """Tell the operator something."""
        self._console.print(self._prefix(OWN_NAME, "bold"), line, sep="")

    def log(self, name: str, line: str) -> None:
        """Show a line that a child printed."""
        if any(words in line for words in MOOT):
            return
        # A stable hash: a child keeps its colour from start to start.
        colour = COLOURS[zlib.crc32(name.encode()) % len(COLOURS)]
        shown = Line(line) if self._as_json else as_text(line)
        style = LEVEL_STYLES.get(shown.level, "")
        for part in shown.text.split("\n"):
            self._console.print(self._prefix(name, colour), Text(part, style=style), sep="")

    def _prefix(self, name: str, style: str) -> Text:
        return Text(f"{name:<{NAME_WIDTH}} | ", style=style)
