"""One direction of a link whose transfers a thread makes, in the order in which they were queued."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from megakv.errors import MegaKVError
from megakv.offload.link import MemoryRows, Move, Ticket

EXIT_SECONDS = 5.0
"""How long the end of the interpreter waits for transfers of a link that nobody closed."""


class QueuedTicket:
    """A transfer that a thread makes.

    Parameters
    ----------
    moves : sequence of Move
    after : sequence of Ticket
        Transfers that must end before.

    Attributes
    ----------
    moves, after : tuple
        Empty once the thread has done its part.
    nbytes, file_bytes : int
        Of all moves, and of those whose rows lie in files.
    error : Exception or None
        Why it failed.
    """

    def __init__(self, moves: Sequence[Move], after: Sequence[Ticket]):
        self.moves, self.after = tuple(moves), tuple(after)
        self.nbytes = sum(move.nbytes for move in moves)
        self.file_bytes = sum(move.nbytes for move in moves if not isinstance(move.host, MemoryRows))
        self.error: Exception | None = None
        self._made = threading.Event()

    @property
    def made(self) -> bool:
        """Whether the thread has done its part, well or badly."""
        return self._made.is_set()

    def end(self, error: Exception | None = None) -> None:
        """Let those who wait go on; what it moved is no longer held."""
        self.error, self.moves, self.after = error, (), ()
        self._made.set()

    def join(self) -> None:
        """Block until the thread has done its part.

        Raises
        ------
        MegaKVError
            If the transfer failed.
        """
        self._made.wait()
        if self.error is not None:
            raise MegaKVError(f"a transfer of {self.nbytes} bytes failed: {self.error}") from self.error


AnyTicket = TypeVar("AnyTicket", bound=QueuedTicket)


def _make(ticket: AnyTicket, make: Callable[[AnyTicket], None]) -> None:
    error: Exception | None = None
    try:
        make(ticket)
    except Exception as problem:  # it belongs to whoever waits for the ticket
        error = problem
    ticket.end(error)


def _work(
    tickets: queue.SimpleQueue[AnyTicket | None], make: Callable[[AnyTicket], None], prepare: Callable[[], None]
) -> None:
    prepare()
    # Threads have modes of their own: outside of this one, tensors of a caller who is in it may not be written to.
    with torch.inference_mode():
        while (ticket := tickets.get()) is not None:
            _make(ticket, make)


def _finish(
    tickets: queue.SimpleQueue[AnyTicket | None], thread: threading.Thread, timeout: float | None = None
) -> None:
    tickets.put(None)
    thread.join(timeout)


class Lane(Generic[AnyTicket]):
    """Transfers of one direction, and the thread that makes them, from the first one on.

    Parameters
    ----------
    name : str
        Of the thread.
    make : callable
        Makes one transfer; what it raises belongs to the ticket.
    prepare : callable, optional
        What the thread does first.
    """

    def __init__(self, name: str, make: Callable[[AnyTicket], None], prepare: Callable[[], None] = lambda: None):
        self._name, self._make, self._prepare = name, make, prepare
        self._queue: queue.SimpleQueue[AnyTicket | None] = queue.SimpleQueue()
        self._latest: AnyTicket | None = None
        self._end: weakref.finalize[..., Lane[AnyTicket]] | None = None

    @property
    def idle(self) -> bool:
        """Whether the thread has done its part of all that was queued."""
        return self._latest is None or self._latest.made

    def put(self, ticket: AnyTicket) -> None:
        """Queue a transfer behind all earlier ones."""
        if self._end is None:
            thread = threading.Thread(
                target=_work, args=(self._queue, self._make, self._prepare), name=self._name, daemon=True
            )
            thread.start()
            # An interpreter that ends while a thread is in the middle of a copy aborts the process.
            self._end = weakref.finalize(self, _finish, self._queue, thread, EXIT_SECONDS)
        self._latest = ticket
        self._queue.put(ticket)

    def make(self, ticket: AnyTicket) -> None:
        """Make a transfer at once, by the thread that calls; all that was queued has been made."""
        assert self.idle
        _make(ticket, self._make)

    def close(self) -> None:
        """End all transfers, and the thread."""
        found = None if self._end is None else self._end.detach()
        if found is not None:
            _, _, (tickets, thread, _), _ = found
            _finish(tickets, thread)
        self._end = self._latest = None
