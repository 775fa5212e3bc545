"""Checks of what is installed: Python, packages, torch, flash-attn."""

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvrelay.doctor.finding import Finding, fail, ok, skipped, warn
from kvrelay.doctor.probe import Probed

PACKAGE: Final = "kvrelay"
EQUALS: Final = {"nixl-cu12": ("nixl", "nixl-cu13")}
"""Wheels of the same library under other names."""

GPU_SIGNS: Final = (Path("/proc/driver/nvidia/gpus"), Path("/dev/nvidia0"))
"""What the driver of a GPU shows, whatever torch is able to see."""

INSTALL_WORKER: Final = "on machines that run replicas: pip install 'kvrelay[worker]'"


def requirements(extra: str = "") -> list[Requirement]:
    """Return what the installed kvrelay requires on this platform: the base, or what an extra adds to it."""
    every = [Requirement(text) for text in importlib.metadata.requires(PACKAGE) or ()]
    base = [each for each in every if _wanted(each, "")]
    return base if not extra else [each for each in every if each not in base and _wanted(each, extra)]


def supported_python() -> str:
    """Return the range of Python versions that the installed kvrelay supports, such as ">=3.11"."""
    return importlib.metadata.metadata(PACKAGE)["Requires-Python"] or ""


def version_of(name: str) -> str:
    """Return the installed version of a distribution, or of one that equals it; empty when there is none."""
    for candidate in (name, *EQUALS.get(name, ())):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def has_gpu(signs: Sequence[Path] = GPU_SIGNS) -> bool:
    """Whether the driver of an NVIDIA GPU is at work here."""
    return any(sign.exists() for sign in signs)


def check_python(running: str, supported: str) -> Finding:
    """Check the version of Python against the supported range, such as ">=3.11"."""
    if SpecifierSet(supported).contains(running, prereleases=True):
        return ok("python", f"{running} (supported: {supported})")
    return fail("python", f"{running}, but kvrelay needs {supported}", f"install Python {supported}")


def check_packages(wanted: Sequence[Requirement], installed: Callable[[str], str]) -> Finding:
    """Check the packages of the base install against their supported ranges."""
    faults = [*_missing(wanted, installed), *_outside(wanted, installed)]
    if faults:
        return fail("packages", "; ".join(faults), "pip install --upgrade kvrelay, in a virtual environment of its own")
    return ok("packages", f"{len(wanted)} packages, all within their ranges")


def check_worker_packages(wanted: Sequence[Requirement], installed: Callable[[str], str]) -> Finding:
    """Check the packages that only replicas need."""
    outside = _outside(wanted, installed)
    if outside:
        return fail("worker packages", "; ".join(outside), "pip install --upgrade 'kvrelay[worker]'")
    missing = _missing(wanted, installed)
    if missing:
        return warn("worker packages", "; ".join(missing), INSTALL_WORKER)
    versions = ", ".join(f"{each.name} {installed(each.name)}" for each in wanted)
    return ok("worker packages", versions)


def check_torch(loaded: Probed, *, gpu: bool) -> Finding:
    """Check that torch imports, and that it sees the GPU that is there."""
    if loaded.error:
        return fail("torch", f"what a replica loads does not load: {loaded.error}", "reinstall kvrelay[worker]")
    torch: Mapping[str, Any] = loaded.values["torch"]
    if not torch:
        return warn("torch", "not installed", INSTALL_WORKER)
    if "error" in torch:
        return fail("torch", torch["error"], "reinstall torch for this Python and platform")
    if torch["devices"]:
        return ok("torch", f"{torch['version']}, CUDA {torch['cuda']}: {', '.join(torch['devices'])}")
    if not gpu:
        return ok("torch", f"{torch['version']}; no GPU: replicas compute on the CPU")
    return _blind(torch["version"], torch["cuda"])


def _blind(version: str, cuda: str) -> Finding:
    """Return the finding of a torch that does not see the GPU."""
    if not cuda:
        return warn("torch", f"{version} is a build for CPUs, and there is a GPU here", "install a CUDA build of torch")
    return warn("torch", f"{version} sees no GPU, and there is one here", "check nvidia-smi and CUDA_VISIBLE_DEVICES")


def check_flash_attn(loaded: Probed) -> Finding:
    """Check that flash-attn imports where there is a GPU for it."""
    name = "flash-attn"
    if loaded.error:
        return skipped(name, "what a replica loads does not load; see torch")
    if not loaded.values["torch"].get("devices"):
        return skipped(name, "no GPU that torch sees; on CPUs kvrelay uses an attention of its own")
    flash: Mapping[str, Any] = loaded.values["flash_attn"]
    if "version" in flash:
        return ok(name, f"{flash['version']}")
    why = flash.get("error", "not installed")
    return warn(name, why, "pip install 'kvrelay[gpu]', built against the torch that is installed")


def _wanted(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _missing(wanted: Sequence[Requirement], installed: Callable[[str], str]) -> list[str]:
    return [f"{each.name} is not installed" for each in wanted if not installed(each.name)]


def _outside(wanted: Sequence[Requirement], installed: Callable[[str], str]) -> list[str]:
    faults = []
    for each in wanted:
        version = installed(each.name)
        if version and not each.specifier.contains(version, prereleases=True):
            faults.append(f"{each.name} {version} is outside {each.specifier}")
    return faults
