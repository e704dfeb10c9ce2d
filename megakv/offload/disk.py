"""A file as a place for rows, and what becomes of rows that the disk refuses."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megakv.base.units import in_units
from megakv.offload.async_io import ALIGNMENT, AsyncReader, find_async_io
from megakv.offload.host_memory import available_memory

logger = logging.getLogger(__name__)

BLOCK_BYTES = 64 << 10
"""What the disk refuses is kept in blocks of that size."""
PROBE_BYTES = 4 << 20
"""Behind the budget, for what is written and read again to try the disk."""
LEAST_PROBE_BYTES, GROWTH = 64 << 10, 4
"""What is measured with first, and how many times as many bytes come next."""
ENOUGH_S, REPEATS = 0.3, 2
"""Once measuring has taken so long, no more follow: a slow disk shows its speed with few bytes."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, of any type."""
    return tensor.view(-1).view(torch.uint8)


def _blocks(offset: int, count: int) -> Iterator[tuple[int, slice, slice]]:
    """The blocks of a file that a range lies in: number, the range's part of each, and that part of the range."""
    for index in range(offset // BLOCK_BYTES, -(-(offset + count) // BLOCK_BYTES)):
        first = index * BLOCK_BYTES
        low, high = max(first, offset), min(first + BLOCK_BYTES, offset + count)
        yield index, slice(low - first, high - first), slice(low - offset, high - offset)


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
    is gone when the process ends, however that happens. `io` is as `megakv.offload.disk_io`; then ``aio`` or ``files``.
    """

    name = "disk"

    def __init__(self, budget: int, folder: str | Path, *, io: str = "files"):
        self.budget = budget
        self.io = "files"
        self._reader: AsyncReader | None = None
        self._folder = str(folder)
        # Blocks of the file in host memory, some of which the disk refused; None as long as it refused nothing.
        self._refused: dict[int, bytearray] | None = None
        self._lock = threading.Lock()
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
        self._read_with(io)

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
        # Whoever reads rows has waited for those that were written: only then may some of them have been refused.
        refused = self._refused
        if refused is None:
            (self._read if self._reader is None else self._reader.read)(offset, memory)
            return
        with self._lock:
            blocks = list(_blocks(offset, len(memory)))
            if any(index not in refused for index, _, _ in blocks):
                self._read(offset, memory)
            for index, inner, outer in blocks:
                if index in refused:
                    memory[outer] = refused[index][inner]

    def _read_with(self, io: str) -> None:
        """Take DeepSpeed's asynchronous I/O if it is asked for, is there, and reads what was written."""
        module, reason = find_async_io(io)
        if module is not None:
            probe = bytearray(os.urandom(PROBE_BYTES))
            with suppress(OSError):
                os.pwrite(self.fileno, probe, self._probed)
            self._reader, found = AsyncReader(module, self.fileno, self._read), bytearray(len(probe))
            self._reader.read(self._probed, memoryview(found))
            if self._reader.refused or found != probe:
                self._reader.close()
                module, self._reader, reason = None, None, f"it cannot read a file in {self._folder!r}"
        if module is not None:
            self.io = "aio"
        elif io == "aio":
            self._file.close()
            raise ValueError(
                f"megakv.offload.disk_io = 'aio': DeepSpeed's asynchronous I/O cannot be used: {reason}; "
                "use 'auto' or 'files'"
            )
        else:
            logger.info("the disk tier is read as a plain file: %s", reason)

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
        while self._refused is None and done < len(memory):
            try:
                done += os.pwritev(self.fileno, [memory[done:]], offset + done)
            except OSError as error:
                self._refused = {}
                logger.warning(
                    "writing to megakv.offload.disk_path = %r failed (%s): what it should take stays in host memory "
                    "from now on, beyond megakv.offload.host_gb; generation goes on as long as that lasts",
                    self._folder,
                    error.strerror,
                )
        if self._refused is None:
            return
        with self._lock:
            # Another thread's failure may have kept a block as it was before this write reached the file.
            for index, inner, outer in _blocks(offset, done):
                if index in self._refused:
                    self._refused[index][inner] = memory[outer]
            if done < len(memory):
                self._keep(offset + done, memory[done:])

    def _keep(self, offset: int, memory: memoryview) -> None:
        free = available_memory()
        if free is not None and len(memory) > free:
            raise OSError(f"and host memory has no room for what it refuses ({in_units(free)} are free)")
        assert self._refused is not None
        for index, inner, outer in _blocks(offset, len(memory)):
            if index not in self._refused:
                block = bytearray(BLOCK_BYTES)
                # The other rows of the block lie there.
                self._read(index * BLOCK_BYTES, memoryview(block))
                self._refused[index] = block
            self._refused[index][inner] = memory[outer]

    def measure(self) -> float:
        """Bandwidth of reading, in bytes per second; 0 where the disk fails.

        Where the file system cannot be made to forget what it holds in the page cache, reading looks faster than the
        disk is.
        """
        begun, rate, nbytes = time.perf_counter(), 0.0, LEAST_PROBE_BYTES
        while nbytes <= PROBE_BYTES and time.perf_counter() - begun < ENOUGH_S and self._refused is None:
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
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._file.close()
        self._refused = None
