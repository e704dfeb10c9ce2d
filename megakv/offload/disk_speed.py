"""How fast the disk tier is: rows are written to unused pages of it and read again, past the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from megakv.offload.disk import DiskTier, FileRows
from megakv.offload.pages import PagedRows, unwritten
from megakv.offload.pool import PagePool

LEAST, MOST, GROWTH = 64 << 10, 4 << 20, 4
"""Bytes that are written and read: at first, at most, and how many times as many come next."""
ENOUGH_S = 0.3
"""Once it has taken so long, no more follow: a slow disk shows its speed with few."""
REPEATS = 2


def disk_rates(disk: DiskTier, pool: PagePool, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """Bandwidth of reading and of writing rows, in bytes per second; 0 where the disk has no unused pages, or fails.

    They are read as transfers read them, and written until the disk has them. Where the file system cannot be made to
    forget what it holds in the page cache, reading looks faster than the disk is.
    """
    begun, rates = time.perf_counter(), (0.0, 0.0)
    nbytes = LEAST
    while nbytes <= MOST and time.perf_counter() - begun < ENOUGH_S and not disk.rescued:
        rows, count = PagedRows(pool, width, dtype, only=disk), -(-nbytes // (width * dtype.itemsize))
        if not pool.has_room(rows.bytes_for(count), disk):
            break
        rows.extend(count)
        try:
            read_s, write_s = _seconds(rows, count, dtype)
        except OSError:
            # What it refuses is said when it matters.
            break
        sent = count * width * dtype.itemsize
        rates = sent / read_s, sent / write_s
        nbytes *= GROWTH
    return rates


def _seconds(rows: PagedRows, count: int, dtype: torch.dtype) -> tuple[float, float]:
    """Of reading rows, and of writing them."""
    # Some file systems would not write zeros.
    content = torch.frombuffer(bytearray(os.urandom(count * rows.width * dtype.itemsize)), dtype=torch.uint8)
    moves, pages = rows.moves(0, content.view(dtype).view(count, rows.width))
    for ticket in unwritten(pages):
        ticket.settle()
    parts = [(move.host, move.device) for move in moves if isinstance(move.host, FileRows)]

    def write() -> None:
        for part, memory in parts:
            part.write_through(memory)

    def read() -> None:
        for part, memory in parts:
            part.read_into(memory)

    write_s = min(_timed(write) for _ in range(REPEATS))
    reads = []
    for _ in range(REPEATS):
        for part, _memory in parts:
            part.forget()
        reads.append(_timed(read))
    return min(reads), write_s


def _timed(call: Callable[[], None]) -> float:
    """Seconds of a call; the fastest of several counts, as others are held up by what else the disk has to do."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
