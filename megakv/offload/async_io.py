"""Reading a file through DeepSpeed's asynchronous I/O (DeepNVMe): several requests at a time, past the page cache."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import accelerator_name, installed_ops

from megakv.distributed.compat import drop_stale_lock, op_folder

logger = logging.getLogger(__name__)

OP = "async_io"
ALIGNMENT = 4096
"""Reads past the page cache begin and end at multiples of the disk's blocks, in memory and in the file."""
BLOCK_BYTES = 128 << 10
"""One request."""
HALF_BYTES = 1 << 20
"""Requests that are sent together; while they are under way, what came before is copied to where it belongs."""
SMALL_BYTES = 64 << 10
"""Less than that is read the plain way."""


def find_async_io(asked: str) -> tuple[Any, str]:
    """DeepSpeed's module for asynchronous I/O, or None and the reason why there is none.

    ``aio`` builds it where that has not been done yet, which takes minutes; ``auto`` takes it where DeepSpeed was
    installed with it; ``files`` takes none.
    """
    accelerator = get_accelerator()
    built = installed_ops.get(OP, False) and accelerator_name == accelerator._name
    if asked == "files":
        return None, "plain files are asked for"
    if asked == "auto" and not built:
        return None, "DeepSpeed was installed without it (DS_BUILD_AIO=1 builds it then)"
    try:
        builder = accelerator.create_op_builder("AsyncIOBuilder")
        if not built and (builder is None or not builder.is_compatible(verbose=False)):
            return None, "the library libaio and its headers are not installed (package libaio-dev or libaio-devel)"
        refused = _refused()
        if refused is not None:
            return None, refused
        if not built:
            _say_what_comes(drop_stale_lock(OP))
        return builder.load(verbose=False), ""
    except (RuntimeError, ImportError, OSError) as error:
        return None, f"DeepSpeed cannot load it: {error}"


def _say_what_comes(lock: Path | None) -> None:
    folder = op_folder(OP)
    if lock is not None:
        logger.warning("waiting for another process to build DeepSpeed's %s; should there be none, remove %s", OP, lock)
    elif not (folder / f"{OP}.so").exists():
        logger.warning("building DeepSpeed's %s in %s, once for this machine: it takes minutes", OP, folder)


def _libaio() -> ctypes.CDLL | None:
    # Debian has changed its name.
    for name in ("libaio.so.1", "libaio.so.1t64"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None


def _refused() -> str | None:
    """What the system does not allow; DeepSpeed's library ends the process where it meets that."""
    library, libc = _libaio(), ctypes.CDLL(None)
    if library is None:
        return "the library libaio is not installed"
    context = ctypes.c_void_p()
    status = library.io_setup(HALF_BYTES // BLOCK_BYTES, ctypes.byref(context))
    if status < 0:
        return f"the system allows no asynchronous requests (io_setup: {os.strerror(-status)})"
    library.io_destroy(context)
    memory = torch.empty(2 * HALF_BYTES, dtype=torch.uint8)
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())
    if libc.mlock(address, size):
        return f"{2 * HALF_BYTES >> 20} MiB of memory cannot be locked (see ulimit -l)"
    libc.munlock(address, size)
    return None


class AsyncReader:
    """Reads a file that is open, and may have no name.

    DeepSpeed's library does not look at the results of its requests: each leaves a mark at the end of its block where
    it failed or came back short, and such a block is read again `plainly`, which says what is wrong; `refused` counts
    them. The file's size is a multiple of `ALIGNMENT`.
    """

    def __init__(self, module: Any, fd: int, plainly: Callable[[int, memoryview], None]):
        self._fd = fd
        self._plainly = plainly
        self._mark = os.urandom(16)
        self._lock = threading.Lock()
        # A handle waits for all that it was asked for, so each half has its own.
        self._handles = [module.aio_handle(BLOCK_BYTES, HALF_BYTES // BLOCK_BYTES, False, False, 1) for _ in range(2)]
        like = torch.empty(0, dtype=torch.uint8)
        self._halves = [handle.new_cpu_locked_tensor(HALF_BYTES, like) for handle in self._handles]
        self._memory = [half.numpy().data for half in self._halves]
        self.refused = 0

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill memory with what lies from a byte on."""
        begin, end = offset // ALIGNMENT * ALIGNMENT, -(-(offset + len(memory)) // ALIGNMENT) * ALIGNMENT
        if len(memory) < SMALL_BYTES or os.fstat(self._fd).st_size < end:
            self._plainly(offset, memory)
            return
        with self._lock:
            self._read(offset, memory, begin, end)

    def close(self) -> None:
        """Give its memory back."""
        self._memory = []
        for handle, half in zip(self._handles, self._halves, strict=True):
            handle.free_cpu_locked_tensor(half)
        self._handles, self._halves = [], []

    def _start(self, half: int, first: int, size: int) -> bool:
        for last in self._ends(size):
            self._memory[half][last - len(self._mark) : last] = self._mark
        status = self._handles[half].async_pread(self._halves[half][:size], f"/proc/self/fd/{self._fd}", first)
        return bool(status == 0)

    def _finish(self, half: int, first: int, size: int, offset: int, memory: memoryview) -> None:
        """Wait for a half and copy what is wanted of it."""
        self._handles[half].wait()
        ends = self._ends(size)
        failed = [last for last in ends if self._memory[half][last - len(self._mark) : last] == self._mark]
        low, high = max(first, offset), min(first + size, offset + len(memory))
        memory[low - offset : high - offset] = self._memory[half][low - first : high - first]
        for last in failed:
            self._again(first + (last - 1) // BLOCK_BYTES * BLOCK_BYTES, first + last, offset, memory)

    def _read(self, offset: int, memory: memoryview, begin: int, end: int) -> None:
        under_way: list[tuple[int, int, int]] = []
        try:
            for index, first in enumerate(range(begin, end, HALF_BYTES)):
                if len(under_way) == len(self._halves):
                    self._finish(*under_way.pop(0), offset, memory)
                half, size = index % len(self._halves), min(HALF_BYTES, end - first)
                if self._start(half, first, size):
                    under_way.append((half, first, size))
                else:
                    self._again(first, first + size, offset, memory)
            while under_way:
                self._finish(*under_way.pop(0), offset, memory)
        finally:
            for half, _, _ in under_way:
                self._handles[half].wait()

    def _again(self, first: int, last: int, offset: int, memory: memoryview) -> None:
        """Read what is wanted of a part of the file the plain way."""
        self.refused += 1
        low, high = max(first, offset), min(last, offset + len(memory))
        if low < high:
            self._plainly(low, memory[low - offset : high - offset])

    @staticmethod
    def _ends(size: int) -> list[int]:
        """Where the blocks of a half end."""
        return [min(first + BLOCK_BYTES, size) for first in range(0, size, BLOCK_BYTES)]
