"""Cases of `offload.py` in which host memory is too small: budgets, a paced disk, and what steps read from it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from megakv.offload.disk import DiskTier
from megakv.offload.record import StepRecord

from .offload_plan import Case, Shape

PAGES, MOST_KIB = 8, 64
"""Pages of a sequence's keys and values in a layer, at least, as far as these can be so small, and their size at most:
what lies in memory is then close to what is asked for."""
GRACE_S = 1e-3
"""A read that follows another sooner than that is one of a row of them: it makes good what the other overslept."""


def budgets(case: Case, shape: Shape, element_bytes: int) -> dict[str, Any]:
    """Settings of ``megakv.offload`` that say where rows lie.

    The file is in the folder for temporary ones (TMPDIR). Host memory is the same for every method: those that keep
    activations have more on disk.
    """
    assert case.in_memory is not None
    cache = case.cache_bytes(shape, element_bytes)
    page_kib = cache // (shape.layers * case.batch * PAGES) >> 10
    return {
        "host_gb": case.in_memory * cache / (1 << 30),
        # All of it has room there, whatever the method, and what each sequence's last pages leave empty.
        "disk_gb": case.host_bytes(shape, element_bytes) / (1 << 30),
        "disk_path": tempfile.gettempdir(),
        "page_kib": min(MOST_KIB, 1 << max(0, page_kib.bit_length() - 1)),
    }


class PacedReads:
    """Reads of a disk tier that are no faster than a bandwidth, in place of its own `read`.

    The file is real. Read as any file and without a pace, memory that nobody uses would serve it: the page cache holds
    what was just written, and gives it back many times as fast as the emulated link takes it.
    """

    def __init__(self, disk: DiskTier, bytes_s: float):
        self._read, self._bytes_s = disk.read, bytes_s
        self._free = 0.0
        disk.read = self  # type: ignore[method-assign]

    def __call__(self, offset: int, memory: memoryview) -> None:
        begun = time.perf_counter()
        self._read(offset, memory)
        self._free = (self._free if begun - self._free < GRACE_S else begun) + len(memory) / self._bytes_s
        time.sleep(max(0.0, self._free - time.perf_counter()))


def disk_figures(case: Case, steps: Sequence[StepRecord], io: str) -> dict[str, Any]:
    """What a method's steps read from disk."""
    return {
        "in_memory_share": case.in_memory,
        "disk": "emulated",
        "disk_gb_s": case.disk_gb_s,
        "disk_io": io,
        "disk_bytes": statistics.mean(step.disk_bytes for step in steps),
        # Of the rate at which rows came, as steps showed it.
        "disk_utilisation": statistics.median(step.report().disk_utilisation for step in steps),
    }
