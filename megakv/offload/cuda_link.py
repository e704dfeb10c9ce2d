"""The link of an accelerator that computes and copies in streams: one for each direction, ordered by events.

Rows in memory are copied by the accelerator, and queued for it at once. Files are read and written by a thread for each
direction, through two pinned buffers in turns. What comes behind a file in its direction goes through the thread, too,
until that has caught up: so all of a direction is queued in the order in which it was begun.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from megakv.device import Clock, HostClock
from megakv.offload.host_memory import in_units
from megakv.offload.link import Direction, Link, Move, Traffic, Transfer

logger = logging.getLogger(__name__)

PINNED_BYTES = 4 << 20
"""Files are read and written in pieces of that size at most."""
PINNED_BUFFERS = 2


class Streams(Protocol):
    """What a link needs of an accelerator; events are those of `torch.cuda`, or the like."""

    def stream(self) -> Any:
        """A new stream."""

    def current(self) -> Any:
        """The one that this thread computes in."""

    def event(self, stream: Any, *, timed: bool) -> Any:
        """A moment in a stream: when all that was queued there so far is over."""

    def copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Queue copies, each to a tensor from another one: neither's memory is used for others before they are over."""

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory that is copied fast and beside computation."""

    def enter_thread(self) -> None:
        """Called once by every thread of the link before it works: its device is this one."""


class CudaStreams:
    """Streams and events of a CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def event(self, stream: Any, *, timed: bool) -> Any:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                # Memory that is given back meanwhile goes to nobody else before the copy is over.
                (target if target.is_cuda else source).record_stream(stream)

    def enter_thread(self) -> None:
        # A new thread is on the first device, where memory that it pins would take a context of its own.
        torch.cuda.set_device(self._device)

    def pinned(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            logger.warning(
                "pinning host memory failed for %s that rows of files pass through (%s): copies are slow, not "
                "beside computation; a higher limit of locked memory (ulimit -l) avoids that",
                in_units(nbytes),
                str(error).partition("\n")[0],
            )
            return torch.empty(nbytes, dtype=torch.uint8)


class StreamClock:
    """Moments in the stream that a thread computes in."""

    def __init__(self, streams: Streams):
        self._streams = streams

    def mark(self) -> Any:
        return self._streams.event(self._streams.current(), timed=True)

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Moments of what a device computes."""
    return StreamClock(CudaStreams(device)) if device.type == "cuda" else HostClock()


class _StreamTransfer(Transfer):
    """A transfer of a `StreamLink`: made when all of it is queued in the stream, and all files are written.

    It comes after the event `ready`, begins and ends at two others.
    """

    after: tuple[_StreamTransfer, ...]

    def __init__(self, direction: Direction, moves: Sequence[Move], after: Sequence[_StreamTransfer], streams: Streams):
        super().__init__(direction, moves, after)
        self.ready = streams.event(streams.current(), timed=False)
        self.begun: Any = None
        self.ended: Any = None
        self._streams = streams
        self._done = False

    @property
    def done(self) -> bool:
        # Asked for again and again, for every page that it wrote to.
        if not self._done and self.made:
            self._done = self.ended is None or bool(self.ended.query())
        return self._done

    @property
    def seconds(self) -> float | None:
        """What it took, once it is done; None where it failed."""
        return None if self.error is not None else float(self.begun.elapsed_time(self.ended)) / 1e3

    def wait(self) -> None:
        self._made.wait()
        if self.ended is not None:
            self.ended.wait(self._streams.current())
        self.join()

    def settle(self) -> None:
        self._made.wait()
        if self.ended is not None and not self.done:
            self.ended.synchronize()
        self.join()


class _PinnedBuffers:
    """Pieces of host memory through which rows of files pass, in turns."""

    def __init__(self, streams: Streams):
        self._free = deque[tuple[Tensor, Any]]((streams.pinned(PINNED_BYTES), None) for _ in range(PINNED_BUFFERS))

    def take(self) -> Tensor:
        """The one that was given back first, when it is free."""
        memory, used = self._free.popleft()
        if used is not None:
            used.synchronize()
        return memory

    def give(self, memory: Tensor, used: Any) -> None:
        """Give one back that is in use until an event is over; None for one that is not."""
        self._free.append((memory, used))


class StreamLink(Link):
    """The link of an accelerator with such streams (`CudaStreams` but in tests)."""

    def __init__(self, streams: Streams):
        super().__init__(StreamClock(streams), streams.enter_thread)
        self._streams = streams
        self._own: dict[Direction, Any] = {name: streams.stream() for name in self._traffic}
        self._buffers: dict[Direction, _PinnedBuffers] = {}
        self._untimed: dict[Direction, deque[_StreamTransfer]] = {name: deque() for name in self._traffic}

    @property
    def traffic(self) -> dict[Direction, Traffic]:
        for direction, transfers in self._untimed.items():
            while transfers and transfers[0].done:
                transfer = transfers.popleft()
                if (seconds := transfer.seconds) is not None:
                    self._traffic[direction].end(transfer, seconds)
        return self._traffic

    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Transfer] = ()) -> Transfer:
        before = [other for other in after if isinstance(other, _StreamTransfer)]
        assert len(before) == len(after), "a transfer of another link"
        transfer = _StreamTransfer(direction, moves, before, self._streams)
        self._traffic[direction].begin(transfer)
        self._untimed[direction].append(transfer)
        if not transfer.file_bytes and self._idle(direction) and all(other.made for other in before):
            transfer.make(self._copy)
        else:
            self._queue(transfer)
        return transfer

    def close(self) -> None:
        super().close()
        for stream in self._own.values():
            stream.synchronize()

    # By the thread that begins a transfer, or by that of its direction

    def _copy(self, transfer: _StreamTransfer) -> None:
        stream = self._own[transfer.direction]
        for other in transfer.after:
            other.join()
            other.ended.wait(stream)
        transfer.ready.wait(stream)
        transfer.begun = self._streams.event(stream, timed=True)
        try:
            for in_memory, moves in groupby(transfer.moves, lambda move: move.in_memory):
                if in_memory:
                    self._streams.copy(stream, self._pairs(transfer.direction, moves))
                elif transfer.direction == "in":
                    self._read(stream, moves)
                else:
                    self._write(stream, moves)
        finally:
            # Also of a transfer that fails: what it has queued must be over before its memory is used again.
            transfer.ended = self._streams.event(stream, timed=True)

    def _pairs(self, direction: Direction, moves: Iterable[Move]) -> Iterator[tuple[Tensor, Tensor]]:
        for move in moves:
            for part in self._within_seams(move):
                assert isinstance(part.host, Tensor)
                yield (part.device, part.host) if direction == "in" else (part.host, part.device)

    def _within_seams(self, move: Move) -> Iterable[Move]:
        assert isinstance(move.host, Tensor)
        first = move.host.data_ptr()
        index = bisect_right(self.seams, first)
        if index == len(self.seams) or self.seams[index] >= first + move.nbytes:
            return (move,)
        last = bisect_left(self.seams, first + move.nbytes)
        return move.parts([0, *(seam - first for seam in self.seams[index:last])])

    def _buffers_of(self, direction: Direction) -> _PinnedBuffers:
        if direction not in self._buffers:
            self._buffers[direction] = _PinnedBuffers(self._streams)
        return self._buffers[direction]

    def _read(self, stream: Any, moves: Iterable[Move]) -> None:
        """While one piece is copied, the next one is read."""
        buffers = self._buffers_of("in")
        for piece in _pieces(moves):
            memory, used = buffers.take(), None
            try:
                there = memory[: piece.nbytes]
                Move(piece.host, there).run("in")
                self._streams.copy(stream, [(piece.device, there)])
                used = self._streams.event(stream, timed=False)
            finally:
                buffers.give(memory, used)

    def _write(self, stream: Any, moves: Iterable[Move]) -> None:
        """While one piece is written, the next one is copied."""
        buffers, coming = self._buffers_of("out"), deque[tuple[Move, Tensor, Any]]()

        def land() -> None:
            piece, memory, there = coming.popleft()
            buffers.give(memory, there)
            there.synchronize()
            Move(piece.host, memory[: piece.nbytes]).run("out")

        try:
            for piece in _pieces(moves):
                if len(coming) == PINNED_BUFFERS:
                    land()
                memory = buffers.take()
                self._streams.copy(stream, [(memory[: piece.nbytes], piece.device)])
                coming.append((piece, memory, self._streams.event(stream, timed=False)))
            while coming:
                land()
        finally:
            for _, memory, there in coming:
                buffers.give(memory, there)


def _pieces(moves: Iterable[Move]) -> Iterator[Move]:
    for move in moves:
        yield from move.parts(range(0, move.nbytes, PINNED_BYTES))
