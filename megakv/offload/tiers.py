"""Where rows lie off the accelerator: host memory and a file, each with a budget, both cut into pages of one size.

Pages of one size leave no gaps that cannot be used again. Those taken one after the other lie one behind the other, so
that a prompt's rows move in few large copies.
"""

from __future__ import annotations

import gc
import heapq
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megakv.errors import MegaKVError
from megakv.offload.link import MemoryRows, Rows, Ticket

logger = logging.getLogger(__name__)

PIN_BYTES = 1 << 30
"""Memory is pinned in pieces of that size: some drivers refuse larger ones."""


def in_units(nbytes: float) -> str:
    """A size for people, such as ``1.50 GiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def available_memory() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
    return sizes.get("MemAvailable")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, of any type."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class Tier(Protocol):
    """Memory of one kind, in pages."""

    name: str
    budget: int

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

    def __init__(self, budget: int, *, pin: bool = False):
        free = available_memory()
        if free is not None and budget > free:
            raise ValueError(
                f"megakv.offload.host_gb asks for {in_units(budget)} of host memory, {in_units(free)} are free; "
                "make it smaller, or put the rest on disk with megakv.offload.disk_gb"
            )
        self.budget = budget
        self._memory = torch.empty(budget, dtype=torch.uint8)
        self._pinned: list[int] = []
        if pin:
            self._pin()

    def rows(self, offset: int, count: int, width: int, dtype: torch.dtype) -> Rows:
        nbytes = count * width * dtype.itemsize
        return MemoryRows(self._memory[offset : offset + nbytes].view(dtype).view(count, width))

    def close(self) -> None:
        runtime = torch.cuda.cudart() if self._pinned else None
        for address in self._pinned:
            assert runtime is not None
            runtime.cudaHostUnregister(address)
        self._pinned.clear()
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
                return
            self._pinned.append(start + first)


@dataclass(frozen=True)
class FileRows:
    """Rows in a file.

    Parameters
    ----------
    descriptor, offset : int
        Open file, and the byte at which they begin.
    nbytes : int
    """

    descriptor: int
    offset: int
    nbytes: int

    def read_into(self, target: Tensor) -> None:
        memory = _bytes_of(target)
        done = 0
        while done < self.nbytes:
            count = os.preadv(self.descriptor, [memory[done:]], self.offset + done)
            if count == 0:
                raise OSError(f"the file ends {self.nbytes - done} bytes early")
            done += count

    def write_from(self, source: Tensor) -> None:
        memory = _bytes_of(source)
        done = 0
        while done < self.nbytes:
            done += os.pwritev(self.descriptor, [memory[done:]], self.offset + done)


class DiskTier:
    """A file without a name, reserved at once, so that the disk cannot fill while tokens are generated.

    Parameters
    ----------
    budget : int
        Bytes.
    folder : path
        Where it lies; it is gone when the process ends, however that happens.

    Raises
    ------
    ValueError
        If the folder cannot be written to, or its disk is too full, with the numbers.
    """

    name = "disk"

    def __init__(self, budget: int, folder: str | Path):
        self.budget = budget
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="megakv-")
        except OSError as error:
            raise ValueError(
                f"megakv.offload.disk_path = {str(folder)!r} cannot be written to: {error.strerror}"
            ) from error
        try:
            os.posix_fallocate(self._file.fileno(), 0, budget)
        except OSError as error:
            self._file.close()
            usage = os.statvfs(folder)
            raise ValueError(
                f"megakv.offload.disk_gb asks for {in_units(budget)} in {str(folder)!r}, where "
                f"{in_units(usage.f_bavail * usage.f_frsize)} are free ({error.strerror}); make it smaller or choose "
                "another megakv.offload.disk_path"
            ) from error

    def rows(self, offset: int, count: int, width: int, dtype: torch.dtype) -> Rows:
        return FileRows(self._file.fileno(), offset, count * width * dtype.itemsize)

    def close(self) -> None:
        self._file.close()


@dataclass
class Page:
    """A page that some rows lie in.

    Parameters
    ----------
    tier : Tier
    offset : int
        Its first byte in the tier.
    users : int
        Sequences that share it; one with several is copied before it is written to.
    written : Ticket, optional
        The last transfer into it.
    """

    tier: Tier
    offset: int
    users: int = 1
    written: Ticket | None = None


@dataclass
class _Free:
    """Unused pages of a tier: those given back, lowest first, then those never used."""

    returned: list[int] = field(default_factory=list)
    fresh: int = 0


class PagePool:
    """The pages of all tiers, taken from the first tier that has any.

    Parameters
    ----------
    tiers : sequence of Tier
        Fastest first.
    page_bytes : int
    """

    def __init__(self, tiers: Sequence[Tier], page_bytes: int):
        self.tiers = tuple(tiers)
        self.page_bytes = page_bytes
        self._free = [_Free() for _ in tiers]
        self._index = {id(tier): index for index, tier in enumerate(tiers)}
        self._capacity = [tier.budget // page_bytes for tier in tiers]

    @property
    def capacity(self) -> int:
        """Pages of all tiers."""
        return sum(self._capacity)

    def used(self) -> dict[str, int]:
        """Bytes in use by tier."""
        return {
            tier.name: (free.fresh - len(free.returned)) * self.page_bytes
            for tier, free in zip(self.tiers, self._free, strict=True)
        }

    def take(self) -> Page:
        """A page of its own.

        Raises
        ------
        MegaKVError
            If all budgets are used up, with the numbers.
        """
        page = self._take()
        if page is None:
            # Caches that nobody holds any more may still wait for the garbage collector.
            gc.collect()
            page = self._take()
        if page is None:
            sizes = ", ".join(f"megakv.offload.{tier.name}_gb holds {in_units(tier.budget)}" for tier in self.tiers)
            raise MegaKVError(f"the offloaded keys and values outgrow their budgets: {sizes}, all of it is in use")
        return page

    def give(self, page: Page) -> None:
        """One user less; without any, the page is free."""
        page.users -= 1
        if page.users == 0:
            heapq.heappush(self._free[self._index[id(page.tier)]].returned, page.offset)

    def _take(self) -> Page | None:
        for tier, free, capacity in zip(self.tiers, self._free, self._capacity, strict=True):
            if free.returned:
                return Page(tier, heapq.heappop(free.returned))
            if free.fresh < capacity:
                free.fresh += 1
                return Page(tier, (free.fresh - 1) * self.page_bytes)
        return None

    def close(self) -> None:
        """Give the tiers back."""
        for tier in self.tiers:
            tier.close()
