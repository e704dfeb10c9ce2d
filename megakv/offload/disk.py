"""A file as a place for rows, and what becomes of rows that the disk refuses."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

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
ALIGNMENT = 4096
"""Reads past the page cache begin and end at multiples of the disk's blocks, in memory and in the file."""
DIRECT_BYTES, READERS = 1 << 20, 4
"""Size of a read past the page cache, and how many are under way at a time."""
MAP_NORESERVE = 0x4000
"""Linux takes memory for such a map page by page, as they are written: its length may be beyond what there is."""
SMALL_BYTES = 64 << 10
"""Fewer bytes are read through the page cache in any case."""


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
    is gone when the process ends, however that happens. With ``direct`` as `io` (`megakv.offload.disk_io`) several
    reads at a time go past the page cache.
    """

    name = "disk"

    def __init__(self, budget: int, folder: str | Path, *, io: str = "files"):
        self.budget = self.seam = budget
        self.io, self._folder = io, str(folder)
        # Once the disk has refused anything: memory as large as the file, and the parts of it that hold rows.
        self._memory: mmap.mmap | None = None
        self._refused: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._direct: int | None = None
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="megakv-")
        except OSError as error:
            raise ValueError(
                f"megakv.offload.disk_path = {self._folder!r} cannot be written to: {error.strerror}"
            ) from error
        try:
            self._probed = -(-budget // ALIGNMENT) * ALIGNMENT
            os.posix_fallocate(self.fileno, 0, self._probed + PROBE_BYTES)
        except OSError as error:
            self._file.close()
            usage = os.statvfs(folder)
            raise ValueError(
                f"megakv.offload.disk_gb asks for {in_units(budget)} in {self._folder!r} for each rank of this host, "
                f"where {in_units(usage.f_bavail * usage.f_frsize)} are free for all of them ({error.strerror}); make "
                "it smaller or choose another megakv.offload.disk_path"
            ) from error
        if io == "direct":
            self._read_past_cache()

    @property
    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def place(self) -> str:
        """Which disk it is, and how it is read."""
        return f"{Path(self._folder).resolve()} ({self.io})"

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
        past_cache = self._direct is not None and len(memory) >= SMALL_BYTES
        (self._read_direct if past_cache else self._read)(offset, memory)
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

    def _read_past_cache(self) -> None:
        """Open the file once more, and look whether its file system takes such reads."""
        self._threads, self._buffers = ThreadPoolExecutor(READERS, "disk"), SimpleQueue[mmap.mmap]()
        for _ in range(READERS):
            self._buffers.put(mmap.mmap(-1, DIRECT_BYTES))
        try:
            self._direct = os.open(f"/proc/self/fd/{self.fileno}", os.O_RDONLY | os.O_DIRECT)
            self._read_direct(self._probed, memoryview(bytearray(ALIGNMENT)))
        except OSError as error:
            self.close()
            raise ValueError(
                f"megakv.offload.disk_io = 'direct': the file system of {self._folder!r} cannot read past the page "
                f"cache ({error.strerror}); use 'files'"
            ) from error

    def _read_direct(self, offset: int, memory: memoryview) -> None:
        """Read in pieces, several at a time, through memory that is aligned as the disk wants it."""
        end, direct = offset + len(memory), self._direct
        assert direct is not None

        def read(first: int) -> None:
            low, high = max(first, offset), min(first + DIRECT_BYTES, end)
            buffer = self._buffers.get()
            try:
                piece = memoryview(buffer)[: -(-(high - first) // ALIGNMENT) * ALIGNMENT]
                if os.preadv(direct, [piece], first) < high - first:
                    # The plain way reads on, or says what is wrong.
                    self._read(low, memory[low - offset : high - offset])
                else:
                    memory[low - offset : high - offset] = piece[low - first : high - first]
            finally:
                self._buffers.put(buffer)

        starts = range(offset // ALIGNMENT * ALIGNMENT, end, DIRECT_BYTES)
        pieces = [self._threads.submit(read, first) for first in starts]
        # Nobody writes to memory of a read that has failed.
        wait(pieces)
        for each in pieces:
            each.result()

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
                # Past the page cache only what is read here must be on the disk, not all that a prompt has left there.
                os.pwritev(self.fileno, [memory], self._probed, os.RWF_DSYNC)
                for _ in range(REPEATS):
                    os.posix_fadvise(self.fileno, self._probed, nbytes, os.POSIX_FADV_DONTNEED)
                    started = time.perf_counter()
                    self.read(self._probed, memoryview(memory))
                    seconds.append(time.perf_counter() - started)
            except OSError:
                # What it refuses is said when it matters.
                break
            # Others are held up by what else the disk has to do.
            rate, nbytes = nbytes / min(seconds), nbytes * GROWTH
        return rate

    def close(self) -> None:
        if self._direct is not None:
            self._threads.shutdown()
            os.close(self._direct)
            self._direct = None
        self._file.close()
        self._memory = None
        self._refused = []
