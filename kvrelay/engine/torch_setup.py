"""What the runner asks of torch and of this machine: threads, device, dtype."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from kvrelay.errors import FailedPrecondition, InvalidArgument

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def use_threads(threads: int) -> None:
    """Set this process's compute threads; 0: half of its cores, since several replicas usually share a machine."""
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // 2))
    with suppress(RuntimeError):  # torch lets it be set once a process; a second runner finds it set
        torch.set_num_interop_threads(1)


def pick_device(name: str) -> torch.device:
    """Return the device to compute on.

    Raises:
        InvalidArgument: torch knows no such device.
        FailedPrecondition: it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument("device", f"{name!r} is not a torch device, such as cpu or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FailedPrecondition("device cuda was asked for, but torch sees no GPU: use --device cpu")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and KV; "auto" is bfloat16 where the hardware computes in it, else float32."""
    if name == "auto":
        name = "bfloat16" if device.type != "cpu" or _cpu_has_bfloat16() else "float32"
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name as in the configuration."""
    return str(dtype).removeprefix("torch.")


def _cpu_has_bfloat16() -> bool:
    """Ask the kernel: torch's own names for this changed between versions."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return not words.isdisjoint(_BFLOAT16_FLAGS)
