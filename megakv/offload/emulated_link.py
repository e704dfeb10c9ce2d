"""An emulated link, for machines without an accelerator: real copies in a thread, paced to a bandwidth.

Whatever is measured on it must say so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megakv.device import HostClock
from megakv.offload.link import Direction, Link, Move, Transfer

PIECE_BYTES = 1 << 20
"""An emulated link copies that much before it looks at the clock."""
LEAST_SLEEP_S = 2e-4
"""Within a transfer an emulated link sleeps no less: each sleep disturbs the thread that computes."""


class _EmulatedTransfer(Transfer):
    def __init__(self, direction: Direction, moves: Sequence[Move], after: Sequence[Transfer]):
        super().__init__(direction, moves, after)
        # First and last address of what is written on the accelerator's side.
        self.written = 0, 0
        if direction == "in" and moves:
            begins = [move.device.data_ptr() for move in moves]
            self.written = min(begins), max(begin + move.nbytes for begin, move in zip(begins, moves, strict=True))
        self.started = time.perf_counter()


class EmulatedLink(Link):
    """A link whose threads, one for each direction, make real copies and keep to a bandwidth, if any is given."""

    def __init__(self, bytes_s: float | None = None):
        if bytes_s is not None and bytes_s <= 0:
            raise ValueError(f"a link of {bytes_s} bytes per second: allowed: more than 0")
        self.bytes_s = bytes_s
        super().__init__(HostClock())
        self._waiting: dict[Direction, list[_EmulatedTransfer]] = {"in": [], "out": []}
        # The moment from which each emulated wire is free: oversleeping is made good by what follows at once.
        self._free: dict[Direction, float] = {"in": 0.0, "out": 0.0}

    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Transfer] = ()) -> Transfer:
        transfer = _EmulatedTransfer(direction, moves, after)
        pending = [other for other in self._waiting[direction] if not other.done]
        low, high = transfer.written
        for other in pending:
            begin, end = other.written
            assert high <= begin or end <= low, "a buffer is used again while a transfer into it is under way"
        self._waiting[direction] = [*pending, transfer]
        self._traffic[direction].begin(transfer)
        self._queue(transfer)
        return transfer

    def _copy(self, transfer: _EmulatedTransfer) -> None:
        direction = transfer.direction
        held_up = not all(other.done for other in transfer.after)
        for other in transfer.after:
            other.settle()
        begun = time.perf_counter()
        wire = free = max(self._free[direction], begun if held_up else transfer.started)
        for move in transfer.moves:
            paced = self.bytes_s is not None and move.in_memory and move.nbytes > PIECE_BYTES
            for piece in move.parts(range(0, move.nbytes, PIECE_BYTES)) if paced else (move,):
                free = self._copy_piece(direction, piece, free)
        self._keep_pace(free, 0.0)
        self._free[direction] = free
        # A thread that wakes up late is no slow wire: it makes that good with what follows.
        seconds = time.perf_counter() - begun if self.bytes_s is None else free - wire
        self._traffic[direction].end(transfer, seconds)

    def _copy_piece(self, direction: Direction, piece: Move, free: float) -> float:
        """Copy a piece; returns when the emulated wire is free again."""
        begun = time.perf_counter()
        piece.run(direction)
        if self.bytes_s is None:
            return free
        # Where memory or the disk is slower than the wire, it sets the pace.
        free += max(piece.nbytes / self.bytes_s, time.perf_counter() - begun)
        self._keep_pace(free, LEAST_SLEEP_S)
        return free

    def _keep_pace(self, free: float, least: float) -> None:
        """Sleep until the emulated wire is free, if that is further away than `least`."""
        ahead = 0.0 if self.bytes_s is None else free - time.perf_counter()
        if ahead > least:
            time.sleep(ahead)
