"""An emulated link, for machines without an accelerator: real copies in a thread, paced to a bandwidth.

Whatever is measured on it must say so.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megakv.errors import MegaKVError
from megakv.offload.link import Direction, MemoryRows, Move, Rows, Ticket, Traffic

PIECE_BYTES = 1 << 20
"""An emulated link copies that much before it looks at the clock."""
LEAST_SLEEP_S = 2e-4
"""Within a transfer an emulated link sleeps no less: each sleep disturbs the thread that computes."""

EXIT_SECONDS = 5.0
"""How long the end of the interpreter waits for copies of a link that nobody closed."""


@dataclass
class _ThreadTicket:
    """A transfer of a `ThreadLink`."""

    moves: tuple[Move, ...]
    after: tuple[Ticket, ...]
    nbytes: int
    written: tuple[int, int]
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


def _written(direction: Direction, moves: Sequence[Move]) -> tuple[int, int]:
    """First and last address of what copies write on the accelerator's side."""
    if direction == "out" or not moves:
        return 0, 0
    begins = [move.device.data_ptr() for move in moves]
    ends = [move.device.data_ptr() + move.nbytes for move in moves]
    return min(begins), max(ends)


def _finish(
    queues: Mapping[Direction, queue.SimpleQueue[_ThreadTicket | None]],
    threads: Sequence[threading.Thread],
    timeout: float | None = None,
) -> None:
    for transfers in queues.values():
        transfers.put(None)
    for thread in threads:
        thread.join(timeout)


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
        # An interpreter that ends while a thread is in the middle of a copy aborts the process.
        self._at_exit = weakref.finalize(self, _finish, self._queues, self._threads, EXIT_SECONDS)

    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Ticket] = ()) -> Ticket:
        written = _written(direction, moves)
        ticket = _ThreadTicket(tuple(moves), tuple(after), sum(move.nbytes for move in moves), written)
        pending = [other for other in self._waiting[direction] if not other.done]
        low, high = written
        for other in pending:
            begin, end = other.written
            assert high <= begin or end <= low, "a buffer is used again while a transfer into it is under way"
        self._waiting[direction] = [*pending, ticket]
        self._queues[direction].put(ticket)
        return ticket

    def close(self) -> None:
        self._at_exit.detach()
        _finish(self._queues, self._threads)

    def _work(self, direction: Direction) -> None:
        # The moment from which the emulated wire is free: oversleeping is made good by what follows at once.
        free = 0.0
        while (ticket := self._queues[direction].get()) is not None:
            error: Exception | None = None
            try:
                held_up = not all(other.done for other in ticket.after)
                for other in ticket.after:
                    other.settle()
                begun = time.perf_counter()
                free = max(free, begun if held_up else ticket.started)
                wire = free
                for move in ticket.moves:
                    free = self._copy(direction, move, free)
                self._keep_pace(free, 0.0)
                traffic = self.traffic[direction]
                traffic.nbytes += ticket.nbytes
                traffic.transfers += 1
                # A thread that wakes up late is no slow wire: it makes that good with what follows.
                traffic.busy_s += time.perf_counter() - begun if self.bytes_s is None else free - wire
            except Exception as problem:  # it belongs to whoever waits for the ticket
                error = problem
            ticket.end(error)

    def _copy(self, direction: Direction, move: Move, free: float) -> float:
        """Copy a move; returns when the emulated wire is free again."""
        if self.bytes_s is None or not isinstance(move.host, MemoryRows) or move.nbytes <= PIECE_BYTES:
            return self._copy_piece(direction, move.host, move.device, free)
        rows = max(1, PIECE_BYTES * len(move.device) // move.nbytes)
        for first in range(0, len(move.device), rows):
            piece = MemoryRows(move.host.rows[first : first + rows])
            free = self._copy_piece(direction, piece, move.device[first : first + rows], free)
        return free

    def _copy_piece(self, direction: Direction, host: Rows, device: Tensor, free: float) -> float:
        begun = time.perf_counter()
        if direction == "in":
            host.read_into(device)
        else:
            host.write_from(device)
        if self.bytes_s is None:
            return free
        # Where memory or the disk is slower than the wire, it sets the pace.
        free += max(host.nbytes / self.bytes_s, time.perf_counter() - begun)
        self._keep_pace(free, LEAST_SLEEP_S)
        return free

    def _keep_pace(self, free: float, least: float) -> None:
        """Sleep until the emulated wire is free, if that is further away than `least`."""
        ahead = 0.0 if self.bytes_s is None else free - time.perf_counter()
        if ahead > least:
            time.sleep(ahead)
