"""A file as a tier, and what becomes of rows that the disk refuses."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megakv.offload.async_io import ALIGNMENT, AsyncReader, find_async_io
from megakv.offload.link import Rows
from megakv.offload.tiers import available_memory, in_units

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
"""Written and read again before asynchronous I/O is trusted."""


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, of any type."""
    return tensor.view(-1).view(torch.uint8).numpy().data


@dataclass
class _Rescue:
    """Rows that the disk refused, in host memory beyond the budget: bytes by where they belong in the file."""

    pieces: dict[int, bytearray] = field(default_factory=dict)
    held: int = 0

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

    def lay_over(self, offset: int, memory: memoryview) -> None:
        """Put what is held of a range into a copy of it."""
        end = offset + len(memory)
        for first, part in self.pieces.items():
            low, high = max(first, offset), min(first + len(part), end)
            if low < high:
                memory[low - offset : high - offset] = part[low - first : high - first]

    def covers(self, offset: int, nbytes: int) -> bool:
        """Whether every byte of a range is held."""
        end = offset + nbytes
        return nbytes == sum(
            max(0, min(first + len(part), end) - max(first, offset)) for first, part in self.pieces.items()
        )


@dataclass(frozen=True)
class FileRows:
    """Rows in the file of a tier.

    Parameters
    ----------
    tier : DiskTier
    offset : int
        The byte at which they begin.
    nbytes : int
    """

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
        """As `write_from`, until the disk itself has them.

        Raises
        ------
        OSError
            If it does not take them.
        """
        self.tier.write_through(self.offset, _bytes_of(source))

    def forget(self) -> None:
        """Let them go from the page cache: what `write_through` wrote is read from the disk then."""
        self.tier.forget(self.offset, self.nbytes)


class DiskTier:
    """A file without a name, reserved at once, so that the disk cannot fill while tokens are generated.

    Should it fail nevertheless, rows that it refuses stay in host memory, beyond the budget, with a warning.

    Parameters
    ----------
    budget : int
        Bytes.
    folder : path
        Where it lies; it is gone when the process ends, however that happens.
    io : str
        How it is read, as `megakv.offload.disk_io`.

    Raises
    ------
    ValueError
        If the folder cannot be written to, its disk is too full, with the numbers, or it cannot be read as asked for.

    Attributes
    ----------
    io : str
        How it is read: ``aio`` or ``files``.
    """

    name = "disk"

    def __init__(self, budget: int, folder: str | Path, *, io: str = "files"):
        self.budget = budget
        self.io: str | None = "files"
        self._reader: AsyncReader | None = None
        self._folder = str(folder)
        self._rescue: _Rescue | None = None
        self._lock = threading.Lock()
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="megakv-")
        except OSError as error:
            raise ValueError(
                f"megakv.offload.disk_path = {self._folder!r} cannot be written to: {error.strerror}"
            ) from error
        try:
            os.posix_fallocate(self._file.fileno(), 0, -(-budget // ALIGNMENT) * ALIGNMENT)
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
    def place(self) -> str:
        """Which disk it is, and how it is read."""
        return f"{Path(self._folder).resolve()} ({self.io})"

    @property
    def rescued(self) -> int:
        """Bytes in host memory that the disk refused."""
        return 0 if self._rescue is None else self._rescue.held

    def rows(self, offset: int, count: int, width: int, dtype: torch.dtype) -> Rows:
        return FileRows(self, offset, count * width * dtype.itemsize)

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill memory with what lies from a byte on.

        Raises
        ------
        OSError
            If the disk does not give it back.
        """
        # Whoever reads rows has waited for those that were written: only then may some of them have been refused.
        rescue = self._rescue
        if rescue is None:
            (self._read if self._reader is None else self._reader.read)(offset, memory)
            return
        with self._lock:
            if not rescue.covers(offset, len(memory)):
                self._read(offset, memory)
            rescue.lay_over(offset, memory)

    def _read_with(self, io: str) -> None:
        """Take DeepSpeed's asynchronous I/O if it is asked for, is there, and reads what was written."""
        module, reason = find_async_io(io)
        if module is not None:
            probe = bytearray(os.urandom(min(PROBE_BYTES, self.budget)))
            self.write(0, memoryview(probe))
            self._reader, found = AsyncReader(module, self._file.fileno(), self._read), bytearray(len(probe))
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
            count = os.preadv(self._file.fileno(), [memory[done:]], offset + done)
            if count == 0:
                raise OSError(f"the file in megakv.offload.disk_path = {self._folder!r} has lost its end")
            done += count

    def write(self, offset: int, memory: memoryview) -> None:
        """Keep memory's bytes from a byte on: in the file, or in host memory once the disk has failed.

        Raises
        ------
        OSError
            If neither takes them.
        """
        done = 0
        while self._rescue is None and done < len(memory):
            try:
                done += os.pwritev(self._file.fileno(), [memory[done:]], offset + done)
            except OSError as error:
                self._rescue = _Rescue()
                logger.warning(
                    "writing to megakv.offload.disk_path = %r failed (%s): what it should take stays in host memory "
                    "from now on, beyond megakv.offload.host_gb; generation goes on as long as that lasts",
                    self._folder,
                    error.strerror,
                )
        if done < len(memory):
            assert self._rescue is not None
            with self._lock:
                self._rescue.put(offset + done, memory[done:])

    def write_through(self, offset: int, memory: memoryview) -> None:
        """Write until the disk itself has all; errors are those of the system."""
        done = 0
        while done < len(memory):
            done += os.pwritev(self._file.fileno(), [memory[done:]], offset + done, os.RWF_DSYNC)

    def forget(self, offset: int, nbytes: int) -> None:
        """Let the page cache forget a range, but for what is not on the disk yet."""
        os.posix_fadvise(self._file.fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._file.close()
        self._rescue = None
