"""Host memory as a place for rows: how much there is to be had, and a budget of it, taken at start."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megakv.base.errors import CombinationError, in_units

logger = logging.getLogger(__name__)

PIN_BYTES = 1 << 30
"""Memory is pinned in pieces of that size: some drivers refuse larger ones."""
LARGE_PAGE_BYTES = 2 << 20
PIECE_BYTES = 256 << 20
"""Memory is taken in pieces of that size: before each, whether the rest is still to be had."""
PROGRESS_S = 5.0
"""Seconds between two messages about memory that is being taken."""
CONTROL_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller, as ``/proc/self/cgroup`` names it (none in version 2): where Linux keeps the limits of groups, the
files with the limit and with what is used, and what of that is free."""


def available_memory(system: Path = Path("/")) -> int | None:
    """Bytes of host memory that can be had without swapping, by the system and by this process's control groups.

    None where neither says; `system` is where the system's own folders ``proc`` and ``sys`` are.
    """
    found = [line.split()[1] for line in _lines(system / "proc/meminfo") if line.startswith("MemAvailable:")]
    free = [int(kilobytes) << 10 for kilobytes in found]
    groups = [line.split(":", 2) for line in _lines(system / "proc/self/cgroup")]
    for controller, (mount, limit, used, reclaimable) in CONTROL_GROUPS.items():
        # In a container the group's path may be that of the host: its own limits are at the top.
        root = system / mount
        for path in [path for _, kinds, path in groups if controller in kinds.split(",")] or ["/"]:
            folder = root / path.strip("/")
            for group in (folder, *(each for each in folder.parents if each.is_relative_to(root))):
                # Without a limit there is no number. File pages that nobody needs count as free.
                with suppress(ValueError):
                    allowed, taken = (int("".join(_lines(group / name))) for name in (limit, used))
                    kinds = dict(line.split() for line in _lines(group / "memory.stat"))
                    free.append(max(0, allowed - taken + int(kinds.get(reclaimable, 0))))
    return min(free, default=None)


def _lines(path: Path) -> list[str]:
    """Of a file; none where it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8").splitlines()
    return []


def check_host_budget(budget: int, free: int | None, *, ranks: int = 1) -> None:
    """Refuse a budget of each of several ranks on a host that has less memory, with both numbers."""
    if free is not None and budget * ranks > free:
        each = "" if ranks == 1 else f" on each of {ranks} ranks of this host"
        raise CombinationError(
            "machine",
            f"megakv.offload.host_gb asks for {in_units(budget)} of host memory{each}, {in_units(free)} are free; "
            "make it smaller, or put the rest on disk with megakv.offload.disk_gb",
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


def take_memory(memory: Tensor, free: Callable[[], int | None] = available_memory) -> None:
    """Have the system give every page of some memory now: one that it lacks later ends the process.

    `free` says what it still has, which others may take meanwhile.
    """
    total, taken, told = memory.numel(), 0, time.monotonic()
    if not total:
        return
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(workers, -(-total // PIECE_BYTES))) as threads:
        pieces = memory.split(PIECE_BYTES)
        for first in range(0, len(pieces), workers):
            check_host_budget(total - taken, free())
            taken += sum(threads.map(_touch, pieces[first : first + workers]))
            if taken < total and time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                logger.info("megakv.offload.host_gb: %s of %s taken", in_units(taken), in_units(total))


def _touch(piece: Tensor) -> int:
    """Write to every page; torch lets other threads of Python work meanwhile."""
    piece[:: mmap.PAGESIZE].zero_()
    piece[-1:].zero_()
    return piece.numel()


class HostTier:
    """Host memory, taken once: its size is exactly the budget in bytes, and all of it is there.

    With `pin` it is page-locked, so that an accelerator copies at full speed beside computation: in pieces, as the
    driver knows each by itself. No copy may go across multiples of `seam` bytes, which is a multiple of `unit`.
    """

    name = "host"

    def __init__(
        self, budget: int, *, pin: bool = False, unit: int = 1, free: Callable[[], int | None] = available_memory
    ):
        check_host_budget(budget, free())
        self.budget = budget
        self.seam = max(unit, PIN_BYTES // unit * unit) if pin else max(unit, budget)
        self._memory = host_memory(budget)
        self._address = self._memory.data_ptr()
        take_memory(self._memory, free)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._pinned: list[int] = []
        if pin:
            self._pin()

    def rows(self, offset: int, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """``[count, width]`` rows that lie one behind the other from a byte on."""
        # One call, as every sequence asks in every layer of every step.
        typed = self._typed.get(dtype)
        if typed is None:
            whole = self._memory.numel() // dtype.itemsize * dtype.itemsize
            typed = self._typed[dtype] = self._memory[:whole].view(dtype)
        assert offset % dtype.itemsize == 0
        return typed.as_strided((count, width), (width, 1), offset // dtype.itemsize)

    def at(self, offset: int, nbytes: int) -> int:
        """The address of so many bytes from one on."""
        assert 0 <= offset <= self._memory.numel() - nbytes
        return self._address + offset

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
        start = self._address
        for first in range(0, self.budget, self.seam):
            size = min(self.seam, self.budget - first)
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
