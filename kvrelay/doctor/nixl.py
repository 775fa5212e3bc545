"""Checks of NIXL and UCX: whether they load, which transport moves KV here, and how fast."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvrelay.doctor import ucx
from kvrelay.doctor.finding import Finding, fail, ok, skipped, warn
from kvrelay.doctor.probe import Probed
from kvrelay.doctor.software import INSTALL_WORKER
from kvrelay.kv.nixl_agent import BACKEND

SHARE_OF_COPY_MIN: Final = 0.3
"""READ bandwidth over memcpy's. Over shared memory it is near 1 on an idle machine, over TCP about 0.1."""

MEASURING: Final = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr"}
"""Makes UCX tell which transport it chose."""


def check_nixl(loaded: Probed) -> Finding:
    """Check that NIXL imports, has its plugins, and opens an agent with UCX behind it."""
    if loaded.error:
        return fail("nixl", f"what a replica loads does not load: {loaded.error}", "reinstall kvrelay[worker]")
    nixl: Mapping[str, Any] = loaded.values["nixl"]
    if not nixl:
        return warn("nixl", "not installed", INSTALL_WORKER)
    name = f"{nixl['module']} {nixl['version'] or '(version unknown)'}"
    plugins = nixl.get("plugins", ())
    if plugins and BACKEND not in plugins:
        advice = "unset NIXL_PLUGIN_DIR, or reinstall the wheel: KV moves over UCX only"
        return fail("nixl", f"{name} has no {BACKEND} plugin, only {', '.join(plugins)}", advice)
    if "error" in nixl:
        why = ucx.complaint(loaded.log) or nixl["error"]
        advice = "unset UCX_TLS and UCX_NET_DEVICES, or let them include tcp and an interface that is here"
        return fail("nixl", f"{name} opens no agent with {BACKEND}: {why}", advice)
    return ok("nixl", f"{name}; plugins {', '.join(plugins)}; {BACKEND} opens an agent")


def check_ucx_libraries(loaded: Probed, replicas: Mapping[str, Sequence[str]]) -> Finding:
    """Check that no process holds two UCX libraries: they fight over memory hooks and signal handlers.

    Args:
        loaded: what a replica would load here.
        replicas: what the replicas that run here have loaded, by name.
    """
    held = {"a new replica": loaded.values.get("ucx_libraries", ()), **replicas}
    for name, libraries in held.items():
        if len(libraries) > 1:
            folders = " and ".join(ucx.folder_of(each) for each in libraries)
            advice = "remove one: LD_LIBRARY_PATH or a package (such as ucx-py or MPI) brings a second UCX"
            return fail("ucx libraries", f"{name} loads {len(libraries)}: {folders}", advice)
    origins = sorted({ucx.folder_of(each) for libraries in held.values() for each in libraries})
    if not origins:
        return skipped("ucx libraries", "no process with UCX could be looked at")
    whose = f" ({len(replicas)} running replicas looked at)" if replicas else ""
    return ok("ucx libraries", f"one a process, from {', '.join(origins)}{whose}")


def check_bandwidth(measured: Probed, environment: Mapping[str, str]) -> Finding:
    """Check that a READ between two processes of this machine works, and judge how it went.

    Args:
        measured: of the probe `bandwidth`, run with `MEASURING`.
        environment: the operator's settings of UCX.
    """
    name = "nixl bandwidth"
    error = measured.error or measured.values.get("error", "")
    if error:
        return fail(name, error, "UCX_LOG_LEVEL=info in the environment of a replica shows what UCX tried")
    size, read_s, copy_s = (measured.values[key] for key in ("bytes", "read_s", "copy_s"))
    share = copy_s / read_s
    transport = ucx.read_transport(measured.log)
    found = (
        f"READ {size / read_s / 1e9:.1f} GB/s over {transport or 'UCX'}, memcpy {size / copy_s / 1e9:.1f} GB/s "
        f"({share:.0%}); {size >> 20} MiB of {measured.values['memory']} between two processes; "
        f"UCX_TLS={environment.get('UCX_TLS', 'all')}"
    )
    if transport and not ucx.is_shared_memory(transport):
        forced = "UCX_TLS" in environment
        return warn(name, found, "unset UCX_TLS: it keeps KV from shared memory" if forced else "see cma")
    if share < SHARE_OF_COPY_MIN:
        return warn(name, found, "run it again on an idle machine; if it stays, see cma and cores")
    return ok(name, found)
