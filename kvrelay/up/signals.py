"""Ctrl-C and SIGTERM: the first one asks, the second one insists."""

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvrelay.up.fleet import Screen


class StopSignals:
    """Counts SIGINT and SIGTERM: the first one sets `first`, the second one kills."""

    def __init__(self, kill: Callable[[], None], screen: Screen) -> None:
        self.first = asyncio.Event()
        self.count = 0
        self._kill = kill
        self._screen = screen

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _came(self) -> None:
        self.count += 1
        if self.count == 1:
            self._screen.say("ending the fleet; once more (Ctrl-C) to kill it")
            self.first.set()
        else:
            self._kill()
