"""The link of an accelerator that computes and copies in streams: one for each direction, ordered by events.

Rows in memory are copied by the accelerator, and queued for it at once. Files are read and written by a thread for each
direction, through pinned memory, a few pieces at a time. What comes behind a file in its direction goes through the
thread, too, until that has caught up: so all of a direction is queued in the order in which it was begun.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megakv.base.device import on_device
from megakv.base.errors import CombinationError, in_units
from megakv.distributed.sharding import IntArray
from megakv.offload.disk import FileRows
from megakv.offload.link import Direction, EmulatedLink, Link, Move, Traffic, Transfer

logger = logging.getLogger(__name__)

PINNED_BYTES = 4 << 20
"""Files are read and written in pieces of that size at most."""
PINNED_PIECES = 2
"""So many of them are copied at a time, in each direction."""


class CudaStreams:
    """Streams and events of a CUDA device: what a link needs of it, and the clock of what it computes."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pins = True

    def stream(self) -> Any:
        """A new stream."""
        return torch.cuda.Stream(self._device)

    def current(self) -> Any:
        """The one that this thread computes in."""
        return torch.cuda.current_stream(self._device)

    def event(self, stream: Any, *, timed: bool) -> Any:
        """A moment in a stream: when all that was queued there so far is over."""
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def copy(self, stream: Any, to: IntArray, source: IntArray, sizes: IntArray, holds: Iterable[Tensor]) -> None:
        """Queue copies between addresses; memory of the accelerator that tensors hold is not used for others before
        they are over."""
        memcpy, queue = self._memcpy, stream.cuda_stream
        for tensor in holds:
            if tensor.is_cuda:
                tensor.record_stream(stream)
        with on_device(self._device):
            for ends in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
                if status := memcpy(*ends, queue):
                    raise RuntimeError(f"the driver refused a copy of {ends[2]} bytes (error {status})")

    @cached_property
    def _memcpy(self) -> Any:
        """The driver's own call: one of torch takes several times as long to queue what a step copies in pieces."""
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
        call.argtypes = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        return call

    def enter_thread(self) -> None:
        """Called once by every thread of the link before it works: its device is this one."""
        # A new thread is on the first device, where memory that it pins would take a context of its own.
        if self._device.index is not None:
            torch.cuda.set_device(self._device)

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory that is copied fast and beside computation."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pins)
        except RuntimeError as error:
            self._pins = False
            logger.warning(
                "pinning host memory failed for %s that rows of files pass through (%s): copies are slow, not "
                "beside computation; a higher limit of locked memory (ulimit -l) avoids that",
                in_units(nbytes),
                str(error).partition("\n")[0],
            )
            return torch.empty(nbytes, dtype=torch.uint8)

    # As a clock

    def mark(self) -> Any:
        return self.event(self.current(), timed=True)

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3


class StreamLink(Link):
    """The link of an accelerator with such streams."""

    def __init__(self, streams: CudaStreams):
        super().__init__(streams, streams.enter_thread)
        self._streams = streams
        self._own: dict[Direction, Any] = {name: streams.stream() for name in self._traffic}
        self._latest: dict[Direction, Transfer] = {}
        self._untimed: dict[Direction, deque[Transfer]] = {name: deque() for name in self._traffic}
        # Pieces of files, and the events behind their copies.
        self._pieces: dict[Direction, deque[tuple[FileRows, Tensor, Any]]] = {name: deque() for name in self._traffic}

    @property
    def traffic(self) -> dict[Direction, Traffic]:
        for direction, transfers in self._untimed.items():
            while transfers and transfers[0].done:
                transfer = transfers.popleft()
                if transfer.error is None:
                    self._traffic[direction].end(transfer, self._streams.seconds(transfer.first, transfer.ended))
        return self._traffic

    def _begin(self, transfer: Transfer) -> None:
        direction = transfer.direction
        self._untimed[direction].append(transfer)
        before = [*transfer.after, *([self._latest[direction]] if direction in self._latest else [])]
        self._latest[direction] = transfer
        if not transfer.file_bytes and all(other.made for other in before):
            try:
                transfer.make(self._copy)
                transfer.work.set_result(None)
            except BaseException as problem:
                transfer.work.set_exception(problem)
                if not isinstance(problem, Exception):
                    raise
        else:
            super()._begin(transfer)

    def close(self) -> None:
        super().close()
        for stream in self._own.values():
            stream.synchronize()

    # By the thread that begins a transfer, or by that of its direction

    def _copy(self, transfer: Transfer) -> None:
        stream = self._own[transfer.direction]
        for other in transfer.after:
            other.join()
            other.ended.wait(stream)
        transfer.begun.wait(stream)
        transfer.first = self._streams.event(stream, timed=True)
        try:
            for in_memory, moves in groupby(transfer.moves, lambda move: move.in_memory):
                if in_memory:
                    self._copy_memory(stream, transfer.direction, list(moves))
                else:
                    self._copy_files(stream, transfer.direction, moves)
        finally:
            # Also of a transfer that fails: what it has queued must be over before its memory is used again.
            transfer.ended = self._streams.event(stream, timed=True)

    def _copy_memory(self, stream: Any, direction: Direction, moves: Sequence[Move]) -> None:
        """All at once."""
        columns = ((move.host, move.device, move.sizes) for move in moves)
        host, device, sizes = map(np.concatenate, zip(*columns, strict=True))
        holds = {id(tensor): tensor for move in moves for tensor in move.holds}.values()
        ends = (device, host) if direction == "in" else (host, device)
        self._streams.copy(stream, *ends, sizes, holds)

    def _copy_files(self, stream: Any, direction: Direction, moves: Iterable[Move]) -> None:
        """While one piece is copied, the next one is read; or the one before is written."""
        coming = self._pieces[direction]

        def land() -> None:
            rows, memory, there = coming.popleft()
            there.synchronize()
            if direction == "out":
                rows.write_from(memory)

        try:
            for move in moves:
                for rows, device, nbytes in move.copies(PINNED_BYTES):
                    if len(coming) == PINNED_PIECES:
                        land()
                    assert not isinstance(rows, int)
                    memory = self._streams.pinned(PINNED_BYTES)[:nbytes]
                    if direction == "in":
                        rows.read_into(memory)
                    through, there, size = np.array([[memory.data_ptr()], [device], [nbytes]])
                    ends = (there, through) if direction == "in" else (through, there)
                    self._streams.copy(stream, *ends, size, move.holds)
                    coming.append((rows, memory, self._streams.event(stream, timed=False)))
            while direction == "out" and coming:
                land()
        except BaseException:
            # Torch does not know of copies under way from memory that it pinned, and would give it to others.
            for *_, there in coming:
                there.synchronize()
            coming.clear()
            raise


def make_link(device: torch.device, emulated_gb_s: float | None) -> Link:
    """The link of a device."""
    if device.type != "cuda":
        return EmulatedLink(None if emulated_gb_s is None else emulated_gb_s * 1e9)
    if emulated_gb_s is not None:
        raise CombinationError(
            "machine", "megakv.offload.emulated_link_gb_s is for machines without an accelerator; leave it out on CUDA"
        )
    return StreamLink(CudaStreams(device))
