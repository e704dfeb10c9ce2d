"""The machine and the package versions that belong to every published number, and the memory that a run took."""

import os
import platform
import re
import resource
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

_PROC = Path("/proc/self")


def machine_info() -> dict[str, Any]:
    """This machine: its name, system, processor, cores that this process may use, memory and accelerators."""
    name = get_accelerator().device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = _matched(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$")
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": cpu.strip() if cpu else platform.processor() or platform.machine(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerator": name,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if name == "cuda" else [],
    }


def version_info() -> dict[str, str]:
    """Versions of Python and of the packages a result depends on; a package that is not installed is left out."""
    versions = {"python": platform.python_version()}
    for package in ("megakv", "torch", "transformers", "deepspeed"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    # The distribution's version may lack what torch itself knows of its build, such as "+cpu".
    versions["torch"] = torch.__version__
    return versions


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Largest memory in use since `reset_peak_memory`, or since the process started, in bytes.

    On the CPU the resident set of the process (without ``/proc`` since its start); on an accelerator what torch's
    allocator held at most.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return int(get_accelerator().max_memory_allocated(device.index))
    peak = _high_water_mark()
    if peak is not None:
        return int(peak) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device | str = "cpu") -> bool:
    """Let `peak_memory_bytes` count from now; False where the system cannot forget the past peak."""
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


def _high_water_mark() -> str | None:
    return _matched(_PROC / "status", r"^VmHWM:\s+(\d+) kB$")


def _matched(path: Path, pattern: str) -> str | None:
    """What a line of a file of ``/proc`` says."""
    try:
        match = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None
