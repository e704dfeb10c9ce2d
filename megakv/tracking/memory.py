"""Peak memory of this process on its device."""

import re
import resource
import sys
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

_PROC = Path("/proc/self")


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Largest memory in use since `reset_peak_memory`, or since the process started, in bytes.

    On the CPU this is the resident set of the process (``VmHWM`` of Linux): weights, caches and the Python
    process itself. Where ``/proc`` does not have it, ``getrusage`` answers, which counts from the start of the
    process and cannot be reset. On an accelerator it is what torch's allocator held at most on ``device``.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return int(get_accelerator().max_memory_allocated(device.index))
    peak = _high_water_mark()
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device | str = "cpu") -> bool:
    """Let `peak_memory_bytes` count from now.

    Returns
    -------
    bool
        False where the system cannot forget the past peak (no writable ``/proc/self/clear_refs``): then
        `peak_memory_bytes` still counts from the start of the process.
    """
    device = torch.device(device)
    if device.type != "cpu":
        get_accelerator().reset_peak_memory_stats(device.index)
        return True
    if _high_water_mark() is None:
        return False
    try:
        # 5 sets the high-water mark to the present resident set (proc(5)).
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> int | None:
    try:
        status = (_PROC / "status").read_text()
    except OSError:
        return None
    match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None
