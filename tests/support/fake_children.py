"""Children of a fleet that only live, die and write down what happened; and a fleet of them as a program of its own.

Run as `python fake_children.py FOLDER ON_EXIT NAME:BEHAVIOUR…`: supervises these children until a signal comes.
"""

import asyncio
import sys
from pathlib import Path

from kvrelay.config import UpConfig
from kvrelay.up.plan import ChildSpec, Kind
from kvrelay.up.run import Run, run_fleet

KINDS = {"store": Kind.STORE, "registry": Kind.REGISTRY, "router": Kind.ROUTER}

PROGRAM = """
import os, pathlib, signal, sys
folder, name, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def note(what):
    with open(folder / "journal", "a") as journal:
        journal.write(f"{what} {name}\\n")

def drained(number, frame):
    note("drained")
    os._exit(0)

if behaviour == "crash":
    print("cannot bind the port", file=sys.stderr)
    sys.exit(7)
if behaviour != "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else drained)
signal.signal(signal.SIGINT, lambda number, frame: note("interrupted"))
if behaviour == "chatty":
    print("x" * 200_000)
    print("after the long line")
(folder / f"{name}.pid").write_text(str(os.getpid()))
note("started")
if behaviour == "die-once" and (folder / "journal").read_text().count(f"started {name}\\n") == 1:
    os._exit(9)
while True:
    signal.pause()
"""

START_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 20.0


class Lines:
    """A screen that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.logged: list[tuple[str, str]] = []

    def say(self, line: str) -> None:
        self.said.append(line)
        print(line, flush=True)

    def log(self, name: str, line: str) -> None:
        self.logged.append((name, line))
        print(f"{name}: {line[:200]}", flush=True)


def fake_child(folder: Path, name: str, behaviour: str = "live") -> ChildSpec:
    """Return the spec of a child; its kind comes from its name."""
    command = (sys.executable, "-S", "-c", PROGRAM, str(folder), name, behaviour)
    return ChildSpec(name=name, kind=KINDS.get(name) or Kind(name.partition("-")[0]), command=command)


def journal(folder: Path) -> list[str]:
    """Return what the children wrote down, such as "drained router"."""
    path = folder / "journal"
    return path.read_text().splitlines() if path.exists() else []


def has_started(folder: Path):
    """Return a probe: a child is ready when it has written down that it started."""

    async def probe(spec: ChildSpec) -> bool:
        return f"started {spec.name}" in journal(folder)

    return probe


async def main(folder: Path, on_exit: str, children: list[str]) -> int:
    """Supervise until a signal comes."""
    lines = Lines()

    async def session() -> int:
        lines.say("fleet ready")
        await asyncio.Event().wait()
        return 0

    what = Run(
        config=UpConfig(on_exit=on_exit, state_dir=str(folder), start_timeout_s=START_TIMEOUT_S),
        children=[fake_child(folder, *child.split(":")) for child in children],
        router="127.0.0.1:1",
        drain_timeout_s=DRAIN_TIMEOUT_S,
        probe=has_started(folder),
    )
    return await run_fleet(what, lines, session)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])))
