"""What to do when a child process of the fleet dies. Pure."""

import enum
from collections import defaultdict, deque
from collections.abc import Callable

CRASHES_MAX = 3
"""So many deaths of one child within the window are a crash loop: it will not mend itself."""

CRASH_WINDOW_S = 60.0
"""Longer than the slowest start of a replica on a laptop, so that a child that dies while starting counts."""


class Action(enum.Enum):
    """What follows the death of a child."""

    RESTART = "restart"
    """Start it again, same id and port."""
    END = "end"
    """End the fleet, because the operator wants every death to."""
    GIVE_UP = "give up"
    """End the fleet, because the child is in a crash loop."""


class RestartPolicy:
    """Counts the deaths of each child within a sliding window.

    Args:
        on_exit: "restart", or "fail" to end the fleet at the first death.
        clock: monotonic seconds.
    """

    def __init__(self, on_exit: str, clock: Callable[[], float]) -> None:
        self._on_exit = on_exit
        self._clock = clock
        self._deaths: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=CRASHES_MAX))

    def died(self, name: str) -> Action:
        """Take note of a death now, and tell what follows."""
        if self._on_exit == "fail":
            return Action.END
        deaths = self._deaths[name]
        deaths.append(self._clock())
        looping = len(deaths) == CRASHES_MAX and deaths[-1] - deaths[0] <= CRASH_WINDOW_S
        return Action.GIVE_UP if looping else Action.RESTART
