"""The link of an accelerator that computes and copies in streams: one for each direction, ordered by events.

Rows in memory are copied by the accelerator, and queued for it at once. Files are read and written by a thread for each
direction, through two buffers in turns. What comes behind a file in its direction goes through the thread, too, until
that has caught up: so all of a direction is queued in the order in which it was begun.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

from torch import Tensor

from megakv.offload.clock import Clock
from megakv.offload.lane import Lane, QueuedTicket
from megakv.offload.link import Direction, MemoryRows, Move, Ticket, Traffic

BOUNCE_BYTES = 4 << 20
"""Files are read and written in pieces of that size at most."""
BOUNCES = 2


class Streams(Protocol):
    """What a link needs of an accelerator.

    Events are those of `torch.cuda`, or the like: they are waited for by streams (``wait``) and threads
    (``synchronize``), and tell whether they are over (``query``) and milliseconds between them (``elapsed_time``).
    """

    def stream(self) -> Any:
        """A new stream."""

    def current(self) -> Any:
        """The one that this thread computes in."""

    def event(self, stream: Any, *, timed: bool) -> Any:
        """A moment in a stream: when all that was queued there so far is over."""

    def copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Queue copies, each to a tensor from another one: neither's memory is used for others before they are over."""

    def bounce(self, nbytes: int) -> Tensor:
        """Host memory that is copied fast and beside computation."""

    def enter_thread(self) -> None:
        """Called once by every thread of the link before it works: its device is this one."""


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


class _StreamTicket(QueuedTicket):
    """A transfer of a `StreamLink`: made when all of it is queued in the stream, and all files are written."""

    after: tuple[_StreamTicket, ...]

    def __init__(
        self, direction: Direction, moves: Sequence[Move], after: Sequence[_StreamTicket], ready: Any, streams: Streams
    ):
        super().__init__(moves, after)
        self.direction = direction
        self.ready = ready
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


class _Bounces:
    """Pieces of host memory through which rows of files pass, in turns."""

    def __init__(self, streams: Streams):
        self._free: deque[tuple[Tensor, Any]] = deque((streams.bounce(BOUNCE_BYTES), None) for _ in range(BOUNCES))

    def take(self) -> Tensor:
        """The one that was given back first, when it is free."""
        memory, used = self._free.popleft()
        if used is not None:
            used.synchronize()
        return memory

    def give(self, memory: Tensor, used: Any) -> None:
        """Give one back that is in use until an event is over; None for one that is not."""
        self._free.append((memory, used))


class StreamLink:
    """The link of an accelerator.

    Parameters
    ----------
    streams : Streams
    """

    emulated = False

    def __init__(self, streams: Streams):
        self.clock: Clock = StreamClock(streams)
        self.seams: list[int] = []
        self._traffic: dict[Direction, Traffic] = {"in": Traffic(), "out": Traffic()}
        self._streams = streams
        self._own: dict[Direction, Any] = {name: streams.stream() for name in self._traffic}
        self._lanes = {name: Lane(f"link-{name}", self._make, streams.enter_thread) for name in self._traffic}
        self._bounces: dict[Direction, _Bounces] = {}
        self._untimed: dict[Direction, deque[_StreamTicket]] = {name: deque() for name in self._traffic}

    @property
    def traffic(self) -> dict[Direction, Traffic]:
        for direction, tickets in self._untimed.items():
            while tickets and tickets[0].done:
                ticket = tickets.popleft()
                if (seconds := ticket.seconds) is not None:
                    self._traffic[direction].end(ticket.nbytes, seconds, ticket.file_bytes)
        return self._traffic

    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Ticket] = ()) -> Ticket:
        before = [other for other in after if isinstance(other, _StreamTicket)]
        assert len(before) == len(after), "a transfer of another link"
        ready = self._streams.event(self._streams.current(), timed=False)
        ticket = _StreamTicket(direction, moves, before, ready, self._streams)
        self._traffic[direction].begin(ticket.nbytes, ticket.file_bytes)
        self._untimed[direction].append(ticket)
        lane = self._lanes[direction]
        if not ticket.file_bytes and lane.idle and all(other.made for other in before):
            lane.make(ticket)
        else:
            lane.put(ticket)
        return ticket

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        for stream in self._own.values():
            stream.synchronize()

    # By the thread that begins a transfer, or by that of its direction

    def _make(self, ticket: _StreamTicket) -> None:
        stream = self._own[ticket.direction]
        for other in ticket.after:
            other.join()
            other.ended.wait(stream)
        ticket.ready.wait(stream)
        ticket.begun = self._streams.event(stream, timed=True)
        try:
            for in_memory, moves in groupby(ticket.moves, lambda move: isinstance(move.host, MemoryRows)):
                if in_memory:
                    self._streams.copy(stream, self._pairs(ticket.direction, moves))
                elif ticket.direction == "in":
                    self._read(stream, moves)
                else:
                    self._write(stream, moves)
        finally:
            # Also of a transfer that fails: what it has queued must be over before its memory is used again.
            ticket.ended = self._streams.event(stream, timed=True)

    def _pairs(self, direction: Direction, moves: Iterable[Move]) -> Iterator[tuple[Tensor, Tensor]]:
        for move in moves:
            for part in self._within_seams(move):
                assert isinstance(part.host, MemoryRows)
                rows = part.host.rows
                yield (part.device, rows) if direction == "in" else (rows, part.device)

    def _within_seams(self, move: Move) -> Iterable[Move]:
        assert isinstance(move.host, MemoryRows)
        first = move.host.rows.data_ptr()
        index = bisect_right(self.seams, first)
        if index == len(self.seams) or self.seams[index] >= first + move.nbytes:
            return (move,)
        last = bisect_left(self.seams, first + move.nbytes)
        return move.parts([0, *(seam - first for seam in self.seams[index:last])])

    def _bounces_of(self, direction: Direction) -> _Bounces:
        if direction not in self._bounces:
            self._bounces[direction] = _Bounces(self._streams)
        return self._bounces[direction]

    def _read(self, stream: Any, moves: Iterable[Move]) -> None:
        """While one piece is copied, the next one is read."""
        bounces = self._bounces_of("in")
        for piece in _pieces(moves):
            memory, used = bounces.take(), None
            try:
                there = memory[: piece.nbytes]
                piece.host.read_into(there)
                self._streams.copy(stream, [(piece.device, there)])
                used = self._streams.event(stream, timed=False)
            finally:
                bounces.give(memory, used)

    def _write(self, stream: Any, moves: Iterable[Move]) -> None:
        """While one piece is written, the next one is copied."""
        bounces, coming = self._bounces_of("out"), deque[tuple[Move, Tensor, Any]]()

        def land() -> None:
            piece, memory, there = coming.popleft()
            bounces.give(memory, there)
            there.synchronize()
            piece.host.write_from(memory[: piece.nbytes])

        try:
            for piece in _pieces(moves):
                if len(coming) == BOUNCES:
                    land()
                memory = bounces.take()
                self._streams.copy(stream, [(memory[: piece.nbytes], piece.device)])
                coming.append((piece, memory, self._streams.event(stream, timed=False)))
            while coming:
                land()
        finally:
            for _, memory, there in coming:
                bounces.give(memory, there)


def _pieces(moves: Iterable[Move]) -> Iterator[Move]:
    for move in moves:
        yield from move.parts(range(0, move.nbytes, BOUNCE_BYTES))
