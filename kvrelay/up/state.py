"""The file that tells other commands what runs: `fleet.json` in the state directory."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvrelay.errors import FailedPrecondition, NotFound
from kvrelay.up.processes import is_running

STATE_FILE = "fleet.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRecord:
    """A child that runs: pid and start time name one process for good."""

    name: str
    kind: str
    address: str
    pid: int
    start_ticks: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """A fleet that runs."""

    pid: int
    start_ticks: int
    router: str
    registry: str
    redis_url: str
    children: tuple[ChildRecord, ...] = ()

    @property
    def running(self) -> bool:
        """Whether the `kvrelay up` that wrote this still runs."""
        return is_running(self.pid, self.start_ticks)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            data = json.loads(text)
            children = tuple(ChildRecord(**child) for child in data.pop("children"))
            return cls(**data, children=children)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError("not the state of a fleet") from error

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


class StateFile:
    """`fleet.json` in a directory, replaced as a whole, so that a reader never sees half of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATE_FILE

    def read(self) -> FleetRecord:
        """Return the fleet that runs here.

        Raises:
            NotFound: none does.
            FailedPrecondition: the file is not one of ours.
        """
        try:
            record = FleetRecord.from_json(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise NotFound(f"no fleet runs here ({self.path} is missing); start one with kvrelay up") from error
        except ValueError as error:
            raise FailedPrecondition(
                f"{self.path} cannot be read ({error}); delete it if no fleet runs here"
            ) from error
        if not record.running:
            raise NotFound(f"no fleet runs here any more ({self.path} is a leftover); start one with kvrelay up")
        return record

    def claim(self) -> None:
        """Make sure that this directory is free for a new fleet.

        Raises:
            FailedPrecondition: a fleet runs here, or the file is not one of ours.
        """
        try:
            record = self.read()
        except NotFound:
            return
        raise FailedPrecondition(
            f"a fleet runs here already (process {record.pid}, router {record.router}); stop it, or give --state-dir"
        )

    def write(self, record: FleetRecord) -> None:
        """Replace the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(record.to_json(), encoding="utf-8")
        new.replace(self.path)

    def remove(self) -> None:
        """Remove the file, if it is there."""
        self.path.unlink(missing_ok=True)
