"""The link between host and accelerator: transfers of rows that run beside computation, in order in each direction.

`CudaLink` uses a stream for each direction. `ThreadLink` is for machines without an accelerator: a thread for each
direction makes real copies, paced to a given bandwidth. Such a link is *emulated*, and whatever is measured on it must
say so.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megakv.errors import MegaKVError

Direction = Literal["in", "out"]
PIECE_BYTES = 1 << 20
"""An emulated link copies that much before it looks at the clock."""


class Rows(Protocol):
    """Rows that lie somewhere on the host: in memory, or in a file."""

    @property
    def nbytes(self) -> int:
        """Their size."""

    def read_into(self, target: Tensor) -> None:
        """Copy them to contiguous host memory of their shape."""

    def write_from(self, source: Tensor) -> None:
        """Copy them from contiguous host memory of their shape."""


@dataclass(frozen=True)
class MemoryRows:
    """Rows in host memory.

    Parameters
    ----------
    rows : Tensor
        ``[n, W]``, contiguous.
    """

    rows: Tensor

    @property
    def nbytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    def read_into(self, target: Tensor) -> None:
        target.copy_(self.rows)

    def write_from(self, source: Tensor) -> None:
        self.rows.copy_(source)


@dataclass(frozen=True)
class Move:
    """One copy.

    Parameters
    ----------
    host : Rows
        Its end on the host.
    device : Tensor
        ``[n, W]``, contiguous: its end on the accelerator.
    """

    host: Rows
    device: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return self.host.nbytes


class Ticket(Protocol):
    """One transfer under way."""

    nbytes: int

    def wait(self) -> None:
        """Let what this thread computes next come after the transfer.

        Raises
        ------
        MegaKVError
            If the transfer failed.
        """

    def settle(self) -> None:
        """Block until the transfer has ended: its memory on the host may be read, or given to others.

        Raises
        ------
        MegaKVError
            If the transfer failed.
        """

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""


@dataclass
class Traffic:
    """What went over a link in one direction.

    Parameters
    ----------
    nbytes, transfers : int
    busy_s : float
        Seconds in which the direction was at work, where the link can tell.
    """

    nbytes: int = 0
    transfers: int = 0
    busy_s: float = 0.0


class Link(Protocol):
    """Both directions between the host and one accelerator."""

    emulated: bool
    traffic: dict[Direction, Traffic]

    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Ticket] = ()) -> Ticket:
        """Queue copies to the accelerator (``in``) or from it (``out``), behind all earlier ones of the direction.

        Parameters
        ----------
        direction : str
        moves : sequence of Move
            What this thread has computed into, or reads from, their device ends so far comes first.
        after : sequence of Ticket
            Transfers, usually of the other direction, that must end before.
        """

    def close(self) -> None:
        """End all transfers and give back threads or streams."""


@dataclass
class _ThreadTicket:
    """A transfer of a `ThreadLink`."""

    moves: tuple[Move, ...]
    after: tuple[Ticket, ...]
    nbytes: int
    started: float = field(default_factory=time.perf_counter)
    error: Exception | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def end(self, error: Exception | None) -> None:
        """Let those who wait go on; what it moved is no longer held."""
        self.error, self.moves, self.after = error, (), ()
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self.error is not None:
            raise MegaKVError(f"a transfer of {self.nbytes} bytes failed: {self.error}") from self.error

    settle = wait

    def writes(self, direction: Direction) -> tuple[int, int]:
        """First and last address of what it writes on the accelerator's side."""
        if direction == "out" or not self.moves:
            return 0, 0
        begins = [move.device.data_ptr() for move in self.moves]
        ends = [move.device.data_ptr() + move.nbytes for move in self.moves]
        return min(begins), max(ends)


class ThreadLink:
    """An emulated link: a thread for each direction that makes real copies and keeps to a bandwidth.

    Parameters
    ----------
    bytes_s : float, optional
        Bandwidth of each direction; None copies as fast as memory allows.

    Raises
    ------
    ValueError
        If the bandwidth is not positive.
    """

    emulated = True

    def __init__(self, bytes_s: float | None = None):
        if bytes_s is not None and bytes_s <= 0:
            raise ValueError(f"a link of {bytes_s} bytes per second: allowed: more than 0")
        self.bytes_s = bytes_s
        self.traffic: dict[Direction, Traffic] = {"in": Traffic(), "out": Traffic()}
        self._queues: dict[Direction, queue.SimpleQueue[_ThreadTicket | None]] = {}
        self._waiting: dict[Direction, list[_ThreadTicket]] = {"in": [], "out": []}
        self._threads: list[threading.Thread] = []
        for direction in self.traffic:
            self._queues[direction] = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, args=(direction,), name=f"link-{direction}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Ticket] = ()) -> Ticket:
        ticket = _ThreadTicket(tuple(moves), tuple(after), sum(move.nbytes for move in moves))
        pending = [other for other in self._waiting[direction] if not other.done]
        low, high = ticket.writes(direction)
        for other in pending:
            begin, end = other.writes(direction)
            assert high <= begin or end <= low, "a buffer is used again while a transfer into it is under way"
        self._waiting[direction] = [*pending, ticket]
        self._queues[direction].put(ticket)
        return ticket

    def close(self) -> None:
        for direction in self._queues:
            self._queues[direction].put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self, direction: Direction) -> None:
        # The moment from which the emulated wire is free: oversleeping is made good by what follows at once.
        free = 0.0
        while (ticket := self._queues[direction].get()) is not None:
            error: Exception | None = None
            try:
                for other in ticket.after:
                    other.settle()
                begun = time.perf_counter()
                free = max(free, ticket.started) if not ticket.after else max(free, begun)
                for move in ticket.moves:
                    free = self._copy(direction, move, free)
                traffic = self.traffic[direction]
                traffic.nbytes += ticket.nbytes
                traffic.transfers += 1
                traffic.busy_s += time.perf_counter() - begun
            except Exception as problem:  # it belongs to whoever waits for the ticket
                error = problem
            ticket.end(error)

    def _copy(self, direction: Direction, move: Move, free: float) -> float:
        rows = max(1, PIECE_BYTES * len(move.device) // max(1, move.nbytes))
        if self.bytes_s is None or not isinstance(move.host, MemoryRows):
            rows = max(1, len(move.device))
        for first in range(0, len(move.device), rows):
            device = move.device[first : first + rows]
            host = MemoryRows(move.host.rows[first : first + rows]) if isinstance(move.host, MemoryRows) else move.host
            if direction == "in":
                host.read_into(device)
            else:
                host.write_from(device)
            if self.bytes_s is not None:
                free += host.nbytes / self.bytes_s
                ahead = free - time.perf_counter()
                if ahead > 0:
                    time.sleep(ahead)
        return free


class _CudaTicket:
    """A transfer of a `CudaLink`."""

    def __init__(self, event: Any, nbytes: int):
        self.nbytes = nbytes
        self._event = event

    @property
    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def settle(self) -> None:
        self._event.synchronize()


class CudaLink:
    """The link of a CUDA device: one stream for each direction, ordered against computation by events.

    Parameters
    ----------
    device : torch.device
    """

    emulated = False

    def __init__(self, device: torch.device):
        self._device = device
        self.traffic: dict[Direction, Traffic] = {"in": Traffic(), "out": Traffic()}
        self._streams: dict[Direction, Any] = {name: torch.cuda.Stream(device) for name in self.traffic}

    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Ticket] = ()) -> Ticket:
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for other in after:
            assert isinstance(other, _CudaTicket)
            stream.wait_event(other._event)
        nbytes = 0
        with torch.cuda.stream(stream):
            for move in moves:
                self._copy(direction, move)
                move.device.record_stream(stream)
                nbytes += move.nbytes
            event = torch.cuda.Event()
            event.record(stream)
        self.traffic[direction].nbytes += nbytes
        self.traffic[direction].transfers += 1
        return _CudaTicket(event, nbytes)

    @staticmethod
    def _copy(direction: Direction, move: Move) -> None:
        if isinstance(move.host, MemoryRows):
            if direction == "in":
                move.device.copy_(move.host.rows, non_blocking=True)
            else:
                move.host.rows.copy_(move.device, non_blocking=True)
            return
        # Files are read and written by the processor: this thread waits for them.
        bounce = torch.empty(move.device.shape, dtype=move.device.dtype)
        if direction == "in":
            move.host.read_into(bounce)
            move.device.copy_(bounce)
        else:
            bounce.copy_(move.device)
            move.host.write_from(bounce)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def make_link(device: torch.device, emulated_bytes_s: float | None) -> Link:
    """The link of a device.

    Raises
    ------
    ValueError
        If an emulated bandwidth is given for a real accelerator.
    """
    if device.type == "cuda":
        if emulated_bytes_s is not None:
            raise ValueError(
                "megakv.offload.emulated_link_gb_s is for machines without an accelerator; leave it out on CUDA"
            )
        return CudaLink(device)
    return ThreadLink(emulated_bytes_s)
