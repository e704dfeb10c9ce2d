"""The machine and the package versions that belong to every published number."""

import os
import platform
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def machine_info() -> dict[str, Any]:
    """Describe this machine.

    Returns
    -------
    dict
        ``host``, ``system``, ``cpu`` (model name), ``cores`` (those this process may use), ``memory_bytes``,
        ``accelerator`` (deepspeed's name, ``"cpu"`` without one), ``devices`` (accelerator names, in order).
    """
    accelerator = get_accelerator()
    name = accelerator.device_name()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if name == "cuda" else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerator": name,
        "devices": devices,
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


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()
