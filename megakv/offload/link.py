"""The link between host and accelerator: transfers of rows that run beside computation, in order in each direction.

`cuda_link.py` uses a stream for each direction, `emulated_link.py` emulates a link where there is no accelerator. Both
have a thread of each direction, from its first transfer on that needs one: all of them, or those that touch files.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megakv.device import Clock
from megakv.errors import MegaKVError

Direction = Literal["in", "out"]
"""To the accelerator, or from it."""


class StoredRows(Protocol):
    """Rows that lie in a file."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, target: Tensor) -> None:
        """Copy them to contiguous host memory of their shape."""

    def write_from(self, source: Tensor) -> None:
        """Copy them from contiguous host memory of their shape."""

    def part(self, first: int, nbytes: int) -> StoredRows:
        """So many of their bytes from one on."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, of any type."""
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Move:
    """One copy between rows ``[n, W]`` on the host, in memory or in a file, and such on the accelerator; contiguous."""

    host: Tensor | StoredRows
    device: Tensor

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    @property
    def in_memory(self) -> bool:
        return isinstance(self.host, Tensor)

    def parts(self, starts: Sequence[int]) -> Iterator[Move]:
        """The same as several moves, of which each begins at one of these bytes, ascending from 0."""
        host, device = self.host, as_bytes(self.device)
        for first, last in pairwise([*starts, self.nbytes]):
            part = as_bytes(host)[first:last] if isinstance(host, Tensor) else host.part(first, last - first)
            yield Move(part, device[first:last])

    def run(self, direction: Direction) -> None:
        """Copy now, where the host is the accelerator."""
        if isinstance(self.host, Tensor):
            target, source = (self.device, self.host) if direction == "in" else (self.host, self.device)
            target.copy_(source)
        elif direction == "in":
            self.host.read_into(self.device)
        else:
            self.host.write_from(self.device)


class Transfer:
    """Copies under way; it holds its moves, and what it comes after, until it is made.

    Whoever waits for a transfer that failed gets a MegaKVError.
    """

    def __init__(self, direction: Direction, moves: Sequence[Move], after: Sequence[Transfer]):
        self.direction = direction
        self.moves, self.after = tuple(moves), tuple(after)
        self.nbytes = sum(move.nbytes for move in moves)
        self.file_bytes = sum(move.nbytes for move in moves if not move.in_memory)
        self.error: Exception | None = None
        self._made = threading.Event()

    @property
    def made(self) -> bool:
        """Whether the thread has done its part, well or badly."""
        return self._made.is_set()

    def make(self, copy: Callable[[Any], None]) -> None:
        """Have it copied; an error belongs to whoever waits for the transfer."""
        try:
            copy(self)
        except Exception as problem:
            self.error = problem
        self.moves, self.after = (), ()
        self._made.set()

    def join(self) -> None:
        """Block until the thread has done its part."""
        self._made.wait()
        if self.error is not None:
            raise MegaKVError(f"a transfer of {self.nbytes} bytes failed: {self.error}") from self.error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.made

    def wait(self) -> None:
        """Let what this thread computes next come after the transfer."""
        self.join()

    def settle(self) -> None:
        """Block until it has ended: its memory on the host may be read, or given to others."""
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

    def begin(self, transfer: Transfer) -> None:
        self.nbytes += transfer.nbytes
        self.file_bytes += transfer.file_bytes

    def end(self, transfer: Transfer, seconds: float) -> None:
        self.timed_bytes += transfer.nbytes
        self.busy_s += seconds
        if transfer.file_bytes:
            self.mixed_bytes += transfer.nbytes
            self.timed_file_bytes += transfer.file_bytes
            self.mixed_s += seconds


# Threads have modes of their own: outside of this one, tensors of a caller who is in it may not be written to.
@torch.inference_mode()
def _make(transfer: Transfer, copy: Callable[[Any], None]) -> None:
    transfer.make(copy)


class Link(ABC):
    """Both directions between the host and one accelerator, with a clock of the accelerator's side.

    Each thread calls `prepare` first. No single copy goes across `seams`, addresses on the host in ascending order.
    """

    def __init__(self, clock: Clock, prepare: Callable[[], None] | None = None):
        self.clock = clock
        self.seams: list[int] = []
        self._traffic: dict[Direction, Traffic] = {"in": Traffic(), "out": Traffic()}
        self._threads = {name: ThreadPoolExecutor(1, f"link-{name}", prepare) for name in self._traffic}
        self._queued: dict[Direction, Transfer] = {}

    @property
    def traffic(self) -> dict[Direction, Traffic]:
        """What went each way; what transfers took comes in when they have ended, and nobody waits for that."""
        return self._traffic

    @abstractmethod
    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Transfer] = ()) -> Transfer:
        """Begin copies, behind all earlier ones of the direction, behind the transfers `after`, which usually go the
        other way, and behind what this thread has computed so far."""

    @abstractmethod
    def _copy(self, transfer: Any) -> None:
        """Copy what a transfer moves."""

    def _idle(self, direction: Direction) -> bool:
        """Whether the thread has done its part of all that was queued."""
        return direction not in self._queued or self._queued[direction].made

    def _queue(self, transfer: Transfer) -> None:
        self._queued[transfer.direction] = transfer
        self._threads[transfer.direction].submit(_make, transfer, self._copy)

    def close(self) -> None:
        """End all transfers and give back threads or streams."""
        for thread in self._threads.values():
            thread.shutdown()
