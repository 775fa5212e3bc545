"""What a check found."""

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It works, worse than it could."""
    FAIL = "fail"
    """Something does not work."""
    SKIPPED = "skipped"
    """There was nothing to look at; the finding says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table.

    Attributes:
        check: name of the check, one of `catalogue.CHECKS`.
        status: how bad it is.
        found: what was found; for a skipped check, why it was skipped.
        advice: what to do, one line; empty where nothing is to be done.
    """

    check: str
    status: Status
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        wanted = self.status in {Status.WARN, Status.FAIL}
        assert bool(self.advice) == wanted, f"{self.check}: advice is for what is not well"


def ok(check: str, found: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Return a finding that something could be better."""
    return Finding(check, Status.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """Return a finding that something does not work."""
    return Finding(check, Status.FAIL, found, advice)


def skipped(check: str, reason: str) -> Finding:
    """Return a finding that there was nothing to look at."""
    return Finding(check, Status.SKIPPED, reason)
