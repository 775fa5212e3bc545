"""What UCX's settings and words mean. Pure."""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

SHARED_MEMORY: Final = ("cma", "xpmem", "knem", "posix", "sysv")
"""UCX's transports that copy between processes of one machine without a network."""

ANY_RDMA: Final = frozenset({"all", "ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "ud", "ud_x", "dc", "dc_x"})
"""Words in UCX_TLS that allow RDMA."""

_LIBRARY: Final = re.compile(r"/\S*/libucp\S*\.so\S*")
_COMPLAINT: Final = re.compile(r"UCX +(?:WARN|ERROR) +(.{1,160})")
_READ_TITLE: Final = "remote memory read"
_ROW: Final = re.compile(r"\|\s*\S*\d\S*\s*\|\s*(?P<how>[^|]+?)\s*\|\s*(?P<over>[^|]+?)\s*\|\s*$")
_TABLE_LINES_MAX: Final = 12
"""From a table's title to its last row: a heading, rules, and a row for each range of sizes."""


def libraries_in(maps: str) -> list[str]:
    """Return the UCX libraries that a process has loaded, out of its /proc/PID/maps."""
    return sorted(set(_LIBRARY.findall(maps)))


def read_transport(log: str) -> str:
    """Return what UCX reads large remote memory over, such as "cma/memory", out of its log; empty when it does not say.

    UCX tells so under UCX_PROTO_INFO=y, in a table for each kind of operation, a row for each range of sizes.
    """
    lines = log.splitlines()
    titles = [number for number, line in enumerate(lines) if _READ_TITLE in line]
    if not titles:
        return ""
    rows = [_ROW.search(line) for line in lines[titles[-1] + 1 : titles[-1] + _TABLE_LINES_MAX]]
    found = [row.group("over") for row in rows if row]
    return found[-1] if found else ""


def complaint(log: str) -> str:
    """Return the first thing that UCX warns of in its log, without its heading; empty when there is none."""
    found = _COMPLAINT.search(log)
    return " ".join(found.group(1).split()) if found else ""


def is_shared_memory(transport: str) -> bool:
    """Whether UCX's name of a transport means a copy within this machine."""
    return transport.startswith(SHARED_MEMORY)


def hides_rdma(environment: Mapping[str, str]) -> str:
    """Return the setting that keeps UCX from RDMA, as "NAME=value"; empty when none does."""
    modules = environment.get("UCX_MODULES", "all")
    if not _allows(modules, frozenset({"all", "ib"})):
        return f"UCX_MODULES={modules}"
    transports = environment.get("UCX_TLS", "all")
    if not _allows(transports, ANY_RDMA):
        return f"UCX_TLS={transports}"
    return ""


def unknown_devices(environment: Mapping[str, str], known: frozenset[str]) -> list[str]:
    """Return the devices that UCX_NET_DEVICES names and this machine does not have."""
    named = [word.strip() for word in environment.get("UCX_NET_DEVICES", "all").split(",") if word.strip()]
    if named == ["all"] or (named and named[0].startswith("^")):
        return []
    return [name for name in named if name.partition(":")[0] not in known]


def folder_of(library: str) -> str:
    """Return the folder of a library, which says whose it is."""
    return str(PurePath(library).parent)


def _allows(setting: str, wanted: frozenset[str]) -> bool:
    words = {word.strip() for word in setting.removeprefix("^").split(",")}
    hit = bool(words & wanted)
    return not hit if setting.startswith("^") else hit
