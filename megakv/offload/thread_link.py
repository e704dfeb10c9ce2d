"""An emulated link, for machines without an accelerator: real copies in a thread, paced to a bandwidth.

Whatever is measured on it must say so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from megakv.offload.clock import Clock, HostClock
from megakv.offload.lane import Lane, QueuedTicket
from megakv.offload.link import Direction, MemoryRows, Move, Rows, Ticket, Traffic

PIECE_BYTES = 1 << 20
"""An emulated link copies that much before it looks at the clock."""
LEAST_SLEEP_S = 2e-4
"""Within a transfer an emulated link sleeps no less: each sleep disturbs the thread that computes."""


class _ThreadTicket(QueuedTicket):
    """A transfer of a `ThreadLink`."""

    def __init__(self, direction: Direction, moves: Sequence[Move], after: Sequence[Ticket]):
        super().__init__(moves, after)
        self.direction = direction
        self.written = _written(direction, moves)
        self.started = time.perf_counter()

    @property
    def done(self) -> bool:
        return self.made

    wait = settle = QueuedTicket.join


def _written(direction: Direction, moves: Sequence[Move]) -> tuple[int, int]:
    """First and last address of what copies write on the accelerator's side."""
    if direction == "out" or not moves:
        return 0, 0
    begins = [move.device.data_ptr() for move in moves]
    ends = [move.device.data_ptr() + move.nbytes for move in moves]
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
        self.clock: Clock = HostClock()
        self.seams: list[int] = []
        self.traffic: dict[Direction, Traffic] = {"in": Traffic(), "out": Traffic()}
        self._lanes = {name: Lane(f"link-{name}", self._make) for name in self.traffic}
        self._waiting: dict[Direction, list[_ThreadTicket]] = {"in": [], "out": []}
        # The moment from which each emulated wire is free: oversleeping is made good by what follows at once.
        self._free: dict[Direction, float] = {"in": 0.0, "out": 0.0}

    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Ticket] = ()) -> Ticket:
        ticket = _ThreadTicket(direction, moves, after)
        pending = [other for other in self._waiting[direction] if not other.done]
        low, high = ticket.written
        for other in pending:
            begin, end = other.written
            assert high <= begin or end <= low, "a buffer is used again while a transfer into it is under way"
        self._waiting[direction] = [*pending, ticket]
        self.traffic[direction].begin(ticket.nbytes, ticket.file_bytes)
        self._lanes[direction].put(ticket)
        return ticket

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def _make(self, ticket: _ThreadTicket) -> None:
        direction = ticket.direction
        held_up = not all(other.done for other in ticket.after)
        for other in ticket.after:
            other.settle()
        begun = time.perf_counter()
        wire = free = max(self._free[direction], begun if held_up else ticket.started)
        for move in ticket.moves:
            free = self._copy(direction, move, free)
        self._keep_pace(free, 0.0)
        self._free[direction] = free
        # A thread that wakes up late is no slow wire: it makes that good with what follows.
        seconds = time.perf_counter() - begun if self.bytes_s is None else free - wire
        self.traffic[direction].end(ticket.nbytes, seconds, ticket.file_bytes)

    def _copy(self, direction: Direction, move: Move, free: float) -> float:
        """Copy a move; returns when the emulated wire is free again."""
        if self.bytes_s is None or not isinstance(move.host, MemoryRows) or move.nbytes <= PIECE_BYTES:
            return self._copy_piece(direction, move.host, move.device, free)
        for piece in move.parts(range(0, move.nbytes, PIECE_BYTES)):
            free = self._copy_piece(direction, piece.host, piece.device, free)
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
