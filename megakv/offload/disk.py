"""A file as a place for rows, and what becomes of rows that the disk refuses."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megakv.offload.async_io import ALIGNMENT, AsyncReader, find_async_io
from megakv.offload.host_memory import available_memory, in_units
from megakv.offload.link import as_bytes

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
"""Written and read again before asynchronous I/O is trusted."""


def _bytes_of(tensor: Tensor) -> memoryview:
    return as_bytes(tensor).numpy().data


class _Refused:
    """Rows that the disk refused, in host memory beyond the budget: bytes by where they belong in the file."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytearray] = {}
        self.held = 0

    def put(self, offset: int, memory: memoryview) -> None:
        free = available_memory()
        if free is not None and len(memory) > free:
            raise OSError(f"and host memory has no room for what it refuses ({in_units(free)} are free)")
        end = offset + len(memory)
        for first in [first for first in self.pieces if first < end and offset < first + len(self.pieces[first])]:
            # A page that was given back is written anew.
            old = self.pieces.pop(first)
            self.held -= len(old)
            for start, part in ((first, old[: max(0, offset - first)]), (end, old[max(0, end - first) :])):
                if part:
                    self._keep(start, part)
        self._keep(offset, bytearray(memory))

    def _keep(self, offset: int, part: bytearray) -> None:
        self.held += len(part)
        for first, held in self.pieces.items():
            if first + len(held) == offset:
                held += part
                return
        self.pieces[offset] = part

    def lay_over(self, offset: int, memory: memoryview) -> int:
        """Put what is held of a range into a copy of it; returns how many bytes that is."""
        end, found = offset + len(memory), 0
        for first, part in self.pieces.items():
            low, high = max(first, offset), min(first + len(part), end)
            if low < high:
                memory[low - offset : high - offset] = part[low - first : high - first]
                found += high - low
        return found


@dataclass(frozen=True)
class FileRows:
    """Rows in the file of a tier, from a byte on."""

    tier: DiskTier
    offset: int
    nbytes: int

    def read_into(self, target: Tensor) -> None:
        self.tier.read(self.offset, _bytes_of(target))

    def write_from(self, source: Tensor) -> None:
        self.tier.write(self.offset, _bytes_of(source))

    def part(self, first: int, nbytes: int) -> FileRows:
        return FileRows(self.tier, self.offset + first, nbytes)

    def write_through(self, source: Tensor) -> None:
        """As `write_from`, until the disk itself has them; errors are those of the system."""
        memory, done = _bytes_of(source), 0
        while done < len(memory):
            done += os.pwritev(self.tier.fileno, [memory[done:]], self.offset + done, os.RWF_DSYNC)

    def forget(self) -> None:
        """Let them go from the page cache: what `write_through` wrote is read from the disk then."""
        os.posix_fadvise(self.tier.fileno, self.offset, self.nbytes, os.POSIX_FADV_DONTNEED)


class DiskTier:
    """A file without a name, reserved at once, so that the disk cannot fill while tokens are generated.

    Should it fail nevertheless, rows that it refuses stay in host memory, beyond the budget, with a warning. The file
    is gone when the process ends, however that happens.

    Parameters
    ----------
    budget : int
        Bytes.
    io : str
        How it is read, as `megakv.offload.disk_io`; the attribute is ``aio`` or ``files``.
    """

    name = "disk"

    def __init__(self, budget: int, folder: str | Path, *, io: str = "files"):
        self.budget = budget
        self.io = "files"
        self._reader: AsyncReader | None = None
        self._folder = str(folder)
        self._refused: _Refused | None = None
        self._lock = threading.Lock()
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="megakv-")
        except OSError as error:
            raise ValueError(
                f"megakv.offload.disk_path = {self._folder!r} cannot be written to: {error.strerror}"
            ) from error
        try:
            os.posix_fallocate(self.fileno, 0, -(-budget // ALIGNMENT) * ALIGNMENT)
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

    @property
    def rescued(self) -> int:
        """Bytes in host memory that the disk refused."""
        return 0 if self._refused is None else self._refused.held

    def rows(self, offset: int, count: int, width: int, dtype: torch.dtype) -> FileRows:
        return FileRows(self, offset, count * width * dtype.itemsize)

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill memory with what lies from a byte on; an OSError where the disk does not give it back."""
        # Whoever reads rows has waited for those that were written: only then may some of them have been refused.
        refused = self._refused
        if refused is None:
            (self._read if self._reader is None else self._reader.read)(offset, memory)
            return
        with self._lock:
            if refused.lay_over(offset, memory) < len(memory):
                self._read(offset, memory)
                refused.lay_over(offset, memory)

    def _read_with(self, io: str) -> None:
        """Take DeepSpeed's asynchronous I/O if it is asked for, is there, and reads what was written."""
        module, reason = find_async_io(io)
        if module is not None:
            probe = bytearray(os.urandom(min(PROBE_BYTES, self.budget)))
            self.write(0, memoryview(probe))
            self._reader, found = AsyncReader(module, self.fileno, self._read), bytearray(len(probe))
            self._reader.read(0, memoryview(found))
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
                self._refused = _Refused()
                logger.warning(
                    "writing to megakv.offload.disk_path = %r failed (%s): what it should take stays in host memory "
                    "from now on, beyond megakv.offload.host_gb; generation goes on as long as that lasts",
                    self._folder,
                    error.strerror,
                )
        if done < len(memory):
            assert self._refused is not None
            with self._lock:
                self._refused.put(offset + done, memory[done:])

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._file.close()
        self._refused = None
