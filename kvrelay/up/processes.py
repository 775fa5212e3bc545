"""Which process is which: a process id alone may have passed to another program."""

import os
import signal
from pathlib import Path

from kvrelay.errors import FailedPrecondition, NotFound

START_TICKS_FIELD = 19
"""Index of `starttime` among the fields of /proc/PID/stat after the command name (proc(5) counts it as the 22nd)."""


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot: with the pid it names one process for good.

    Raises:
        NotFound: there is no such process, or no /proc to look it up in.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise NotFound(f"process {pid} is not running") from error
    # The command name stands in parentheses and may hold anything, even parentheses.
    return int(stat.rpartition(")")[2].split()[START_TICKS_FIELD])


def is_running(pid: int, ticks: int) -> bool:
    """Whether that very process still runs."""
    try:
        return start_ticks(pid) == ticks
    except NotFound:
        return False


def send_signal(pid: int, ticks: int, number: signal.Signals) -> None:
    """Send a signal to that very process, never to another one that has got its id.

    Raises:
        NotFound: it has ended.
        FailedPrecondition: the platform or its permissions do not allow it.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise NotFound(f"process {pid} is not running") from error
    except (AttributeError, OSError) as error:
        raise FailedPrecondition(f"process {pid} cannot be reached: {error}") from error
    try:
        # Checked while the handle pins the process: the id cannot pass on between check and signal.
        if not is_running(pid, ticks):
            raise NotFound(f"process {pid} has ended; its id belongs to another program now")
        signal.pidfd_send_signal(handle, number)
    except OSError as error:
        raise FailedPrecondition(f"process {pid} cannot be signalled: {error}") from error
    finally:
        os.close(handle)
