"""A file as a place for rows, and what becomes of rows that the disk refuses."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megakv.base.errors import in_units
from megakv.offload.host_memory import available_memory

logger = logging.getLogger(__name__)

PROBE_BYTES = 4 << 20
"""Behind the budget, for what is written and read again to try the disk."""
LEAST_PROBE_BYTES, GROWTH = 64 << 10, 4
"""What is measured with first, and how many times as many bytes come next."""
ENOUGH_S, REPEATS = 0.3, 2
"""Once measuring has taken so long, no more follow: a slow disk shows its speed with few bytes."""
MAP_NORESERVE = 0x4000
"""Linux takes memory for such a map page by page, as they are written: its length may be beyond what there is."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, of any type."""
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class FileRows:
    """Rows in the file of a tier, from a byte on; they are copied from and to contiguous host memory of their shape."""

    tier: DiskTier
    offset: int
    nbytes: int

    def read_into(self, target: Tensor) -> None:
        self.tier.read(self.offset, as_bytes(target).numpy().data)

    def write_from(self, source: Tensor) -> None:
        self.tier.write(self.offset, as_bytes(source).numpy().data)

    def part(self, first: int, nbytes: int) -> FileRows:
        """So many of their bytes from one on."""
        return FileRows(self.tier, self.offset + first, nbytes)


class DiskTier:
    """A file without a name, reserved at once, so that the disk cannot fill while tokens are generated.

    Should it fail nevertheless, rows that it refuses stay in host memory, beyond the budget, with a warning. The file
    is gone when the process ends, however that happens.
    """

    name = "disk"

    def __init__(self, budget: int, folder: str | Path):
        self.budget = self.seam = budget
        self._folder = str(folder)
        # Once the disk has refused anything: memory as large as the file, and the parts of it that hold rows.
        self._memory: mmap.mmap | None = None
        self._refused: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="megakv-")
        except OSError as error:
            raise ValueError(
                f"megakv.offload.disk_path = {self._folder!r} cannot be written to: {error.strerror}"
            ) from error
        try:
            os.posix_fallocate(self.fileno, 0, budget + PROBE_BYTES)
        except OSError as error:
            self._file.close()
            usage = os.statvfs(folder)
            raise ValueError(
                f"megakv.offload.disk_gb asks for {in_units(budget)} in {self._folder!r} for each rank of this host, "
                f"where {in_units(usage.f_bavail * usage.f_frsize)} are free for all of them ({error.strerror}); make "
                "it smaller or choose another megakv.offload.disk_path"
            ) from error

    @property
    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def place(self) -> str:
        """Which disk it is, and how it is read."""
        return f"{Path(self._folder).resolve()} (files)"

    def rows(self, offset: int, count: int, width: int, dtype: torch.dtype) -> FileRows:
        return self.at(offset, count * width * dtype.itemsize)

    def at(self, offset: int, nbytes: int) -> FileRows:
        """So many bytes from one on."""
        return FileRows(self, offset, nbytes)

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill memory with what lies from a byte on; an OSError where the disk does not give it back."""
        # The disk that refuses to be written to may not be readable either.
        if self._kept(offset, memory):
            return
        self._read(offset, memory)
        # Whoever reads rows has waited for those that were written: only then may some of them have been refused.
        self._kept(offset, memory)

    def _kept(self, offset: int, memory: memoryview) -> bool:
        """Fill in what the disk has refused; whether that is all of it."""
        whole = False
        with self._lock:
            for first, last in self._refused:
                low, high = max(first, offset), min(last, offset + len(memory))
                if self._memory is not None and low < high:
                    memory[low - offset : high - offset] = memoryview(self._memory)[low:high]
                    whole |= high - low == len(memory)
        return whole

    def _read(self, offset: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self.fileno, [memory[done:]], offset + done)
            if count == 0:
                raise OSError(f"the file in megakv.offload.disk_path = {self._folder!r} has lost its end")
            done += count

    def write(self, offset: int, memory: memoryview) -> None:
        """Keep memory's bytes from a byte on: in the file, or in host memory once the disk has failed.

        An OSError where neither takes them.
        """
        done = 0
        while self._memory is None and done < len(memory):
            try:
                done += os.pwritev(self.fileno, [memory[done:]], offset + done)
            except OSError as error:
                self._refuse(error)
        if self._memory is None:
            return
        # Also rows that reached the file: what another thread keeps from now on may lie around them.
        free = available_memory()
        if free is not None and len(memory) > free:
            raise OSError(f"and host memory has no room for what it refuses ({in_units(free)} are free)")
        last = offset + len(memory)
        with self._lock:
            self._memory[offset:last] = memory
            spans = [span for span in self._refused if span[0] <= last and span[1] >= offset]
            whole = min([offset, *(first for first, _ in spans)]), max([last, *(end for _, end in spans)])
            self._refused = [*(span for span in self._refused if span not in spans), whole]

    def _refuse(self, error: OSError) -> None:
        """Take memory in the disk's place from now on, as much as is written to it."""
        with self._lock:
            if self._memory is not None:
                return
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self._memory = mmap.mmap(-1, self.budget, flags=flags)
        logger.warning(
            "writing to megakv.offload.disk_path = %r failed (%s): what it should take stays in host memory "
            "from now on, beyond megakv.offload.host_gb; generation goes on as long as that lasts",
            self._folder,
            error.strerror,
        )

    def measure(self) -> float:
        """Bandwidth of reading, in bytes per second; 0 where the disk fails.

        Where the file system cannot be made to forget what it holds in the page cache, reading looks faster than the
        disk is.
        """
        begun, rate, nbytes = time.perf_counter(), 0.0, LEAST_PROBE_BYTES
        while nbytes <= PROBE_BYTES and time.perf_counter() - begun < ENOUGH_S and self._memory is None:
            # Some file systems would not write zeros.
            memory, seconds = bytearray(os.urandom(nbytes)), []
            try:
                # Only what is read here must be on the disk, not all that a prompt has left in the page cache.
                os.pwritev(self.fileno, [memory], self.budget, os.RWF_DSYNC)
                for _ in range(REPEATS):
                    os.posix_fadvise(self.fileno, self.budget, nbytes, os.POSIX_FADV_DONTNEED)
                    started = time.perf_counter()
                    self.read(self.budget, memoryview(memory))
                    seconds.append(time.perf_counter() - started)
            except OSError:
                # What it refuses is said when it matters.
                break
            # Others are held up by what else the disk has to do.
            rate, nbytes = nbytes / min(seconds), nbytes * GROWTH
        return rate

    def close(self) -> None:
        self._file.close()
        self._memory = None
        self._refused = []
