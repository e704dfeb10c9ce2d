"""The machine and the package versions that belong to every published number, and the memory that a run took."""

import os
import platform
import re
import resource
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from megakv.version import __version__

_PROC = Path("/proc/self")


def machine_info() -> dict[str, Any]:
    """This machine: its name, system, processor, cores that this process may use, memory and accelerators."""
    name = get_accelerator().device_name()
    cpu = _matched(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$")
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": cpu.strip() if cpu else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerator": name,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if name == "cuda" else [],
    }


def version_info() -> dict[str, str]:
    """Versions of Python and of the packages a result depends on; a package that is not installed is left out."""
    versions = {"python": platform.python_version(), "megakv": __version__}
    for package in ("torch", "transformers", "deepspeed"):
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
    peak = _matched(_PROC / "status", r"^VmHWM:\s+(\d+) kB$")
    return int(peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def reset_peak_memory(device: torch.device | str = "cpu") -> bool:
    """Let `peak_memory_bytes` count from now; False where the system cannot forget the past peak."""
    device = torch.device(device)
    if device.type != "cpu":
        get_accelerator().reset_peak_memory_stats(device.index)
        return True
    try:
        # 5 sets the high-water mark to the present resident set (proc(5)).
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _matched(path: Path, pattern: str) -> str | None:
    """What a line of a file of ``/proc`` says."""
    try:
        match = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None
