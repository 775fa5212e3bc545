"""Writes the flag tables of docs/operating.md from `kvrelay.config`: `python -m kvrelay.config_docs FILE`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from kvrelay import config

START = "<!-- flags: generated from kvrelay/config.py by `make gen`; do not edit -->"
END = "<!-- end of flags -->"
PROCESSES: dict[str, type[Any]] = {
    "kvrelay registry": config.RegistryConfig,
    "kvrelay router": config.RouterConfig,
    "kvrelay replica": config.ReplicaConfig,
}


def tables() -> str:
    """Return one Markdown table of flags a process."""
    return "\n\n".join(_table(command, options) for command, options in PROCESSES.items())


def spliced(document: str) -> str:
    """Return the document with the tables between its two markers made anew.

    Raises:
        ValueError: a marker is missing.
    """
    before, _, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the document lacks {START!r} or {END!r}")
    return f"{before}{START}\n\n{tables()}\n\n{END}{after}"


def _table(command: str, options: type[Any]) -> str:
    rows = [_row(field) for field in dataclasses.fields(options)]
    head = [f"### `{command}`", "", "| flag | environment | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def _row(field: "dataclasses.Field[Any]") -> str:
    choices = field.metadata.get("choices")
    meaning = field.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
    default = f"`{field.default}`" if field.default != "" else "empty"
    return f"| `{config.flag_name(field.name)}` | `{config.env_name(field.name)}` | {default} | {meaning} |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(spliced(path.read_text()))
