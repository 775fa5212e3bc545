"""Whether an engine advances."""

import time
from typing import Final

from kvrelay.engine.protocol import Event, StateChanged

PROBE_INTERVAL_S: Final = 1.0
"""Silence after which the engine is asked for a sign of life."""

STALL_AFTER_S: Final = 10.0
"""An engine is wedged after this long without an event or, while answers are written, a step (1-3 s on a busy CPU)."""


class Progress:
    """When the engine was last heard of, and last computed.

    Written by the thread that reads the engine's events, read by any; single attribute reads are atomic.
    """

    def __init__(self) -> None:
        self._heard_at_s = time.monotonic()
        self._stepped_at_s = self._heard_at_s
        self._steps = 0
        self._computing = False

    def seen(self, events: list[Event], now_s: float) -> None:
        """Take note of events."""
        self._heard_at_s = now_s
        for event in events:
            if isinstance(event, StateChanged):
                # Jobs that wait for a pull or a verdict run, too, but need no steps.
                computing = event.state.decode_tokens > 0
                if event.state.steps != self._steps or not computing or not self._computing:
                    self._stepped_at_s = now_s
                self._steps, self._computing = event.state.steps, computing

    def silent(self, now_s: float) -> bool:
        """True when it is time to ask for a sign of life."""
        return now_s - self._heard_at_s >= PROBE_INTERVAL_S

    def stalled(self, now_s: float) -> bool:
        """True when it neither answers nor computes what there is to compute."""
        last_s = min(self._heard_at_s, self._stepped_at_s) if self._computing else self._heard_at_s
        return now_s - last_s > STALL_AFTER_S
