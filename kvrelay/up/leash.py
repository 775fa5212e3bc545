"""Becomes another program that the kernel kills when the process that started it dies.

Run as `python leash.py PARENT_PID PROGRAM ARGUMENT…`. The setting survives exec and is made in the new process itself,
so the parent needs no code between fork and exec, where threads make any code unsafe. Linux only; elsewhere it just
becomes the program. Standard library only: it runs without site-packages, in about 20 ms.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal this process gets when the thread that made it ends."""


def main(parent_pid: int, command: list[str]) -> None:
    """Tie this process to its parent and become `command`; does not return."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the setting
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
