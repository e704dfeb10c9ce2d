"""The link between host and accelerator: transfers of rows that run beside computation, in order in each direction.

`cuda_link.py` uses a stream for each direction. Where there is no accelerator a link is emulated: real copies in a
thread of each direction, paced to a bandwidth. Whatever is measured on it must say so.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megakv.base.device import Clock, HostClock
from megakv.base.errors import MegaKVError
from megakv.distributed.sharding import IntArray
from megakv.offload.disk import FileRows

Direction = Literal["in", "out"]
"""To the accelerator, or from it."""
PIECE_BYTES = 1 << 20
"""An emulated link copies that much before it looks at the clock."""
LEAST_SLEEP_S = 2e-4
"""Within a transfer an emulated link sleeps no less: each sleep disturbs the thread that computes."""
OUTGOING = 4
"""Transfers back to the host that may be under way: each holds its rows on the accelerator."""


@dataclass
class Place:
    """Host memory, or a part of a file: the last transfers into it and out of it, for which whoever reads it, or writes
    to it, next waits."""

    written: Transfer | None = None
    read: Transfer | None = None

    @property
    def busy(self) -> list[Transfer]:
        """Those that have not ended."""
        return [transfer for transfer in (self.written, self.read) if transfer is not None and not transfer.done]


class Copy(NamedTuple):
    """One of a move's."""

    host: int | FileRows
    device: int
    nbytes: int

    def run(self, direction: Direction) -> None:
        host, device, nbytes = self
        if isinstance(host, int):
            ctypes.memmove(*((device, host) if direction == "in" else (host, device)), nbytes)
        else:
            memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(device), dtype=torch.uint8)
            (host.read_into if direction == "in" else host.write_from)(memory)


class Move(NamedTuple):
    """Copies between the host, memory at some addresses or a part of a file, and the accelerator's at as many.

    Addresses, as steps have thousands of copies, and tensors for both ends of one take Python longer to make than the
    copy takes. `holds` own the accelerator's memory, and the host's where it is in no tier, until all are queued;
    `places` are those of a tier that the bytes lie in, where others may read them or write to them.
    """

    host: IntArray | FileRows
    device: IntArray
    sizes: IntArray
    places: Sequence[Place] = ()
    holds: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, host: Tensor | FileRows, device: Tensor, places: Sequence[Place] = ()) -> Move:
        """Between rows on the host and such on the accelerator, all contiguous."""
        assert device.is_contiguous()
        target, sizes = np.array([device.data_ptr()]), np.array([host.nbytes])
        if not isinstance(host, Tensor):
            return cls(host, target, sizes, places, (device,))
        assert host.is_contiguous() and host.nbytes == device.nbytes
        return cls(np.array([host.data_ptr()]), target, sizes, places, (host, device))

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def in_memory(self) -> bool:
        return isinstance(self.host, np.ndarray)

    def run(self, direction: Direction) -> None:
        """Copy now, where the host is the accelerator."""
        for copy in self.copies():
            copy.run(direction)

    def copies(self, most: int | None = None) -> Iterator[Copy]:
        """Each of them, in pieces of at most so many bytes if that is given."""
        host = self.host
        hosts = host.tolist() if isinstance(host, np.ndarray) else [host]
        for each in map(Copy, hosts, self.device.tolist(), self.sizes.tolist()):
            if most is None or each.nbytes <= most:
                yield each
                continue
            for first in range(0, each.nbytes, most):
                count, begin = min(most, each.nbytes - first), each.host
                part = begin + first if isinstance(begin, int) else begin.part(first, count)
                yield Copy(part, each.device + first, count)


class Transfer:
    """Copies under way, behind what was computed until the moment `begun`; it holds its moves, and what it comes after,
    until it is made. Whoever waits for a transfer that failed gets a MegaKVError.

    Where an accelerator has `streams`, a transfer is made when all of it is queued there and all files are written;
    what it copies goes from the event `first` in its stream to `ended`.
    """

    def __init__(
        self, direction: Direction, moves: Sequence[Move], after: Sequence[Transfer], begun: Any, streams: Any = None
    ):
        self.direction, self.begun = direction, begun
        self.moves, self.after = tuple(moves), tuple(after)
        self.nbytes = sum(move.nbytes for move in moves)
        self.file_bytes = sum(move.nbytes for move in moves if not move.in_memory)
        self.error: BaseException | None = None
        self.first: Any = None
        self.ended: Any = None
        self._streams = streams
        self._made, self._done = threading.Event(), False

    @property
    def made(self) -> bool:
        """Whether the thread has done its part, well or badly."""
        return self._made.is_set()

    # Threads have modes of their own: outside of this one, tensors of a caller who is in it may not be written to.
    @torch.inference_mode()
    def make(self, copy: Callable[[Transfer], None]) -> None:
        """Have it copied; an error belongs to whoever waits for the transfer."""
        try:
            copy(self)
        except Exception as problem:
            self.error = problem
        self.moves, self.after = (), ()
        self._made.set()

    def left(self, work: Future[None]) -> None:
        """What was to make it has ended; if it never began, as where a thread could not be made ready, it failed."""
        if not self.made:
            self.error, self.moves, self.after = work.exception() or RuntimeError("it was not begun"), (), ()
            self._made.set()

    def join(self) -> None:
        """Block until the thread has done its part."""
        self._made.wait()
        if self.error is not None:
            raise MegaKVError(f"a transfer of {self.nbytes} bytes failed: {self.error}") from self.error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        # Asked for again and again, for every page that it wrote to.
        if not self._done and self.made:
            self._done = self.ended is None or bool(self.ended.query())
        return self._done

    def wait(self) -> None:
        """Let what this thread computes next come after the transfer."""
        self._made.wait()
        if self.ended is not None:
            self.ended.wait(self._streams.current())
        self.join()

    def settle(self) -> None:
        """Block until it has ended: its memory on the host may be read, or given to others."""
        self._made.wait()
        if self.ended is not None and not self.done:
            self.ended.synchronize()
        self.join()


@dataclass
class Traffic:
    """What went over a link in one direction.

    `nbytes` were begun, of them `file_bytes` in files; `timed_bytes` have ended and kept the direction at work for
    `busy_s`. `mixed_bytes` and `mixed_s` are those of timed transfers with any rows in files, `timed_file_bytes` those
    in files.
    """

    nbytes: int = 0
    timed_bytes: int = 0
    busy_s: float = 0.0
    file_bytes: int = 0
    mixed_bytes: int = 0
    timed_file_bytes: int = 0
    mixed_s: float = 0.0

    def since(self, before: Traffic) -> Traffic:
        """What came after another moment."""
        return Traffic(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def end(self, transfer: Transfer, seconds: float) -> None:
        self.timed_bytes += transfer.nbytes
        self.busy_s += seconds
        if transfer.file_bytes:
            self.mixed_bytes += transfer.nbytes
            self.timed_file_bytes += transfer.file_bytes
            self.mixed_s += seconds


class Link(ABC):
    """Both directions between the host and one accelerator, with a clock of the accelerator's side.

    Each thread calls `prepare` first. No single copy goes across `seams`, addresses on the host in ascending order.
    """

    def __init__(self, clock: Clock, prepare: Callable[[], None] | None = None):
        self.clock = clock
        self.seams: list[int] = []
        self._traffic: dict[Direction, Traffic] = {"in": Traffic(), "out": Traffic()}
        self._threads = {name: ThreadPoolExecutor(1, f"link-{name}", prepare) for name in self._traffic}
        self._outgoing: deque[Transfer] = deque()

    @property
    def traffic(self) -> dict[Direction, Traffic]:
        """What went each way; what transfers took comes in when they have ended, and nobody waits for that."""
        return self._traffic

    def start(self, direction: Direction, moves: Sequence[Move]) -> Transfer:
        """Begin copies, behind all earlier ones of the direction, behind what was to be written to their places before
        it is read, or read before it is written to, and behind what this thread has computed so far."""
        places = [place for move in moves for place in move.places]
        reads = direction == "in"
        # Each once: a transfer may go to many places.
        others = {id(other): other for place in places if (other := place.written if reads else place.read) is not None}
        # What could not be written cannot be read, ever.
        after = [other for other in others.values() if not other.done or (reads and other.error is not None)]
        transfer = self._begin(direction, moves, after)
        for place in places:
            setattr(place, "read" if reads else "written", transfer)
        if not reads:
            self._outgoing.append(transfer)
        self._traffic[direction].nbytes += transfer.nbytes
        self._traffic[direction].file_bytes += transfer.file_bytes
        return transfer

    def hold_up(self) -> None:
        """Wait until no more transfers to the host are under way than may be: each holds its rows."""
        while len(self._outgoing) > OUTGOING:
            self._outgoing.popleft().settle()

    @abstractmethod
    def _begin(self, direction: Direction, moves: Sequence[Move], after: Sequence[Transfer]) -> Transfer:
        """Begin copies behind other transfers."""

    @abstractmethod
    def _copy(self, transfer: Transfer) -> None:
        """Copy what a transfer moves."""

    def _queue(self, transfer: Transfer) -> None:
        self._threads[transfer.direction].submit(transfer.make, self._copy).add_done_callback(transfer.left)

    def close(self) -> None:
        """End all transfers and give back threads or streams."""
        for thread in self._threads.values():
            thread.shutdown()


class EmulatedLink(Link):
    """A link whose threads, one for each direction, make real copies and keep to a bandwidth, if any is given."""

    def __init__(self, bytes_s: float | None = None):
        if bytes_s is not None and bytes_s <= 0:
            raise ValueError(f"a link of {bytes_s} bytes per second: allowed: more than 0")
        self.bytes_s = bytes_s
        super().__init__(HostClock())
        # The moment from which each emulated wire is free: oversleeping is made good by what follows at once.
        self._free: dict[Direction, float] = {"in": 0.0, "out": 0.0}

    def _begin(self, direction: Direction, moves: Sequence[Move], after: Sequence[Transfer]) -> Transfer:
        transfer = Transfer(direction, moves, after, self.clock.mark())
        self._queue(transfer)
        return transfer

    def _copy(self, transfer: Transfer) -> None:
        direction = transfer.direction
        held_up = not all(other.done for other in transfer.after)
        for other in transfer.after:
            other.settle()
        begun = time.perf_counter()
        wire = free = max(self._free[direction], begun if held_up else transfer.begun)
        for move in transfer.moves:
            paced = self.bytes_s is not None and move.in_memory
            for piece in move.copies(PIECE_BYTES if paced else None):
                started = time.perf_counter()
                piece.run(direction)
                if self.bytes_s is not None:
                    # Where memory or the disk is slower than the wire, it sets the pace.
                    free += max(piece.nbytes / self.bytes_s, time.perf_counter() - started)
                    _sleep_until(free, LEAST_SLEEP_S)
        _sleep_until(free)
        self._free[direction] = free
        # A thread that wakes up late is no slow wire: it makes that good with what follows.
        seconds = time.perf_counter() - begun if self.bytes_s is None else free - wire
        self._traffic[direction].end(transfer, seconds)


def _sleep_until(moment: float, least: float = 0.0) -> None:
    """Sleep if the moment is further away than `least`."""
    ahead = moment - time.perf_counter()
    if ahead > least:
        time.sleep(ahead)
