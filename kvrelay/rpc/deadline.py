"""A deadline is made once, at the edge, and asked for the time left at every wait."""

import math
import time
from dataclasses import dataclass
from typing import Protocol, Self

from kvrelay.errors import DeadlineExceeded


class HasTimeRemaining(Protocol):
    """The one part of a servicer context that a deadline needs."""

    def time_remaining(self) -> float | None:
        """Return the seconds left, or None when the caller set no deadline."""
        ...


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock.

    Attributes:
        at_s: `time.monotonic()` seconds; infinity for none.
    """

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Return the deadline that many seconds from now."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def of(cls, context: HasTimeRemaining, default_s: float) -> Self:
        """Return the caller's deadline, or `default_s` from now when the caller set none."""
        left = context.time_remaining()
        return cls.after(default_s if left is None or not math.isfinite(left) else left)

    def left_s(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def expired(self) -> bool:
        """True once the time is over."""
        return time.monotonic() >= self.at_s

    def sooner(self, seconds: float) -> "Deadline":
        """Return this deadline or the one `seconds` from now, whichever comes first."""
        return Deadline(min(self.at_s, time.monotonic() + seconds))

    def check(self, what: str) -> None:
        """Raise once the time is over.

        Raises:
            DeadlineExceeded: `what` could not be done in time.
        """
        if self.expired:
            raise DeadlineExceeded(f"the deadline passed: {what}")
