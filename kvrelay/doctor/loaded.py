"""The probe of what a replica loads: torch, flash-attn, NIXL with UCX. Run as a process; prints a JSON object."""

import contextlib
import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any, Final

from kvrelay.doctor.ucx import libraries_in
from kvrelay.errors import KvrelayError
from kvrelay.kv.nixl_agent import BACKEND, load_bindings

MAPS: Final = Path("/proc/self/maps")


def main() -> None:
    """Load everything in the order in which a replica does, and tell what there is."""
    told: dict[str, Any] = {"torch": _torch(), "flash_attn": _flash_attn(), "nixl": _nixl()}
    with contextlib.suppress(OSError):
        told["ucx_libraries"] = libraries_in(MAPS.read_text(encoding="utf-8", errors="replace"))
    print(json.dumps(told), flush=True)  # noqa: T201 - this is how a probe answers


def _torch() -> dict[str, Any]:
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        return {}
    except Exception as error:  # noqa: BLE001 - whatever a broken install raises is the finding
        return {"error": _line(error)}
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"version": torch.__version__, "cuda": torch.version.cuda or "", "devices": devices}


def _flash_attn() -> dict[str, Any]:
    try:
        return {"version": importlib.import_module("flash_attn").__version__}
    except ModuleNotFoundError as error:
        return {} if error.name == "flash_attn" else {"error": _line(error)}
    except Exception as error:  # noqa: BLE001 - a build for another torch fails with anything
        return {"error": _line(error)}


def _nixl() -> dict[str, Any]:
    try:
        nixl = load_bindings()
    except KvrelayError:
        return {}
    module = nixl.__name__.partition(".")[0]
    told: dict[str, Any] = {"module": module, "version": _version(module)}
    try:
        config = nixl.nixlAgentConfig()
        config.useProgThread = False  # this agent moves nothing, so nobody need watch over it
        agent = nixl.nixlAgent("doctor", config)
        told["plugins"] = sorted(agent.getAvailPlugins())
        agent.createBackend(BACKEND, {})
    except Exception as error:  # noqa: BLE001 - whatever NIXL raises is the finding
        told["error"] = _line(error)
    return told


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    main()
