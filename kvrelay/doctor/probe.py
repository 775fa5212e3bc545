"""Runs what may crash or hang in a process of its own, under a deadline."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

PROBE_TIMEOUT_S: Final = 60.0
"""Importing torch takes two seconds on an idle laptop and many times that on a busy one."""

ERROR_CHARACTERS_MAX: Final = 200
"""Of a probe's last words: a line of the table."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe told: its values, or why there are none; and all that it wrote to standard error."""

    values: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    log: str = ""


def run_probe(
    module: str, *, environment: Mapping[str, str] | None = None, timeout_s: float = PROBE_TIMEOUT_S
) -> Probed:
    """Run a module of this package as a process; its last line on standard output is a JSON object.

    Args:
        module: name of the module, without the package.
        environment: added to this process's environment.
        timeout_s: after that the process is killed.
    """
    # -P: a folder named like one of our packages, where the operator happens to stand, is not ours.
    command = [sys.executable, "-P", "-m", f"{__package__}.{module}"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=os.environ | dict(environment or {}),
        )
    except subprocess.TimeoutExpired:
        return Probed(error=f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Probed(error=str(error))
    log = done.stderr.decode(errors="replace")
    values = last_object(done.stdout.decode(errors="replace"))
    return Probed(error=last_words(done.returncode, log), log=log) if values is None else Probed(values, log=log)


def last_object(output: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line that is one; libraries may print beside it."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except ValueError:
                continue
    return None


def last_words(code: int, log: str) -> str:
    """Say in one line how a probe ended without an answer."""
    if code < 0:
        try:
            return f"the process was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"the process was killed by signal {-code}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:ERROR_CHARACTERS_MAX] if lines else f"the process ended with exit code {code}"
