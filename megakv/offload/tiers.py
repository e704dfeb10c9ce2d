"""Where rows lie off the accelerator: host memory and a file, each with a budget."""

from __future__ import annotations

import logging
import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megakv.offload.link import MemoryRows, Rows

logger = logging.getLogger(__name__)

PIN_BYTES = 1 << 30
"""Memory is pinned in pieces of that size: some drivers refuse larger ones."""
LARGE_PAGE_BYTES = 2 << 20
CONTROL_GROUPS = {
    "/sys/fs/cgroup": ("memory.max", "memory.current", "inactive_file"),
    "/sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Where Linux keeps the limits of this process: the files with the limit and what is used, and what of that is free."""


def in_units(nbytes: float) -> str:
    """A size for people, such as ``1.50 GiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def available_memory() -> int | None:
    """Bytes of host memory that can be had without swapping, by the system and by this process's control group.

    None where neither says.
    """
    found = [_free_of_system(), *(_free_of_group(folder, *names) for folder, names in CONTROL_GROUPS.items())]
    return min((free for free in found if free is not None), default=None)


def _free_of_system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
    return sizes.get("MemAvailable")


def _free_of_group(folder: str, limit: str, used: str, reclaimable: str) -> int | None:
    """Bytes that a control group still allows; file pages that nobody needs count as free."""
    try:
        allowed, taken = (int(Path(folder, name).read_text(encoding="ascii")) for name in (limit, used))
        lines = Path(folder, "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        # Without a limit there is no number.
        return None
    kinds = dict(line.split() for line in lines)
    return max(0, allowed - taken + int(kinds.get(reclaimable, 0)))


def check_host_budget(budget: int, free: int | None, *, ranks: int = 1) -> None:
    """Refuse a budget of each of several ranks on a host that has less memory.

    Raises
    ------
    ValueError
        With both numbers.
    """
    if free is not None and budget * ranks > free:
        each = "" if ranks == 1 else f" on each of {ranks} ranks of this host"
        raise ValueError(
            f"megakv.offload.host_gb asks for {in_units(budget)} of host memory{each}, {in_units(free)} are free; "
            "make it smaller, or put the rest on disk with megakv.offload.disk_gb"
        )


def host_memory(nbytes: int) -> Tensor:
    """So many bytes, in large pages where the system gives them on request.

    Rows are read from end to end: with small pages, looking their addresses up takes a good part of that time, and how
    much depends on where the system finds them.
    """
    if nbytes < LARGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping until it is gone itself.
    return torch.frombuffer(memory, dtype=torch.uint8)


class Tier(Protocol):
    """Memory of one kind, in pages."""

    name: str
    budget: int
    io: str | None
    """How a disk is read; None for memory."""

    def rows(self, offset: int, count: int, width: int, dtype: torch.dtype) -> Rows:
        """``[count, width]`` rows that lie one behind the other from a byte on."""

    def close(self) -> None:
        """Give it back."""


class HostTier:
    """Host memory, taken once: its size is exactly the budget.

    Parameters
    ----------
    budget : int
        Bytes.
    pin : bool
        Whether to page-lock it, so that an accelerator copies at full speed beside computation.

    Raises
    ------
    ValueError
        If the machine has less memory, with both numbers.
    """

    name = "host"
    io: str | None = None

    def __init__(self, budget: int, *, pin: bool = False):
        check_host_budget(budget, available_memory())
        self.budget = budget
        self._memory = host_memory(budget)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._pinned: list[int] = []
        if pin:
            self._pin()

    def rows(self, offset: int, count: int, width: int, dtype: torch.dtype) -> Rows:
        # One call, as every sequence asks in every layer of every step.
        typed = self._typed.get(dtype)
        if typed is None:
            whole = self._memory.numel() // dtype.itemsize * dtype.itemsize
            typed = self._typed[dtype] = self._memory[:whole].view(dtype)
        assert offset % dtype.itemsize == 0
        return MemoryRows(typed.as_strided((count, width), (width, 1), offset // dtype.itemsize))

    @property
    def seams(self) -> list[int]:
        """Addresses at which pieces of pinned memory meet: the driver knows each by itself, and copies within one."""
        start = self._memory.data_ptr()
        return [start + first for first in range(PIN_BYTES, self.budget, PIN_BYTES)] if self._pinned else []

    def close(self) -> None:
        runtime = torch.cuda.cudart() if self._pinned else None
        for address in self._pinned:
            assert runtime is not None
            runtime.cudaHostUnregister(address)
        self._pinned.clear()
        self._typed.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _pin(self) -> None:
        """Pin in place: torch's own pinned memory is rounded up to a power of two."""
        runtime: Any = torch.cuda.cudart()
        start = self._memory.data_ptr()
        for first in range(0, self.budget, PIN_BYTES):
            size = min(PIN_BYTES, self.budget - first)
            status = int(runtime.cudaHostRegister(start + first, size, 0))
            if status:
                logger.warning(
                    "pinning host memory failed after %s of %s (error %d): copies to and from the rest go through a "
                    "staging buffer, at about half the speed and not beside computation; a smaller "
                    "megakv.offload.host_gb, or a higher limit of locked memory (ulimit -l), avoids that",
                    in_units(first),
                    in_units(self.budget),
                    status,
                )
                _forget_error()
                return
            self._pinned.append(start + first)


def _forget_error() -> None:
    """Take back what a refusal leaves behind in CUDA: the next kernel, whoever starts it, would be blamed for it.

    Torch has no call for that alone, but starts no kernel without asking for the latest error, which clears it.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
