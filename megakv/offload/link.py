"""The link between host and accelerator: transfers of rows that run beside computation, in order in each direction.

`stream_link.py` uses a stream for each direction, `thread_link.py` emulates a link where there is no accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from megakv.offload.clock import Clock

Direction = Literal["in", "out"]


class Rows(Protocol):
    """Rows that lie somewhere on the host: in memory, or in a file."""

    @property
    def nbytes(self) -> int:
        """Their size."""

    def read_into(self, target: Tensor) -> None:
        """Copy them to contiguous host memory of their shape."""

    def write_from(self, source: Tensor) -> None:
        """Copy them from contiguous host memory of their shape."""

    def part(self, first: int, nbytes: int) -> Rows:
        """So many of their bytes from one on; their shape is that of so many bytes."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, of any type."""
    return tensor.view(-1).view(torch.uint8)


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

    def part(self, first: int, nbytes: int) -> MemoryRows:
        return MemoryRows(as_bytes(self.rows)[first : first + nbytes])


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

    def parts(self, starts: Sequence[int]) -> Iterator[Move]:
        """The same as several moves, of which each begins at one of these bytes, ascending from 0."""
        device = as_bytes(self.device)
        for first, last in pairwise([*starts, self.nbytes]):
            yield Move(self.host.part(first, last - first), device[first:last])


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
        Begun, where it is known when that is, or ended.
    timed_bytes : int
        Of transfers that have ended and were timed.
    busy_s : float
        Seconds in which the direction was at work on those.
    file_bytes : int
        Of `nbytes`, what lay in files.
    mixed_bytes, timed_file_bytes, mixed_s : int, int, float
        Of timed transfers with any from files, or to them: their bytes, those in files, and seconds.
    """

    nbytes: int = 0
    transfers: int = 0
    timed_bytes: int = 0
    busy_s: float = 0.0
    file_bytes: int = 0
    mixed_bytes: int = 0
    timed_file_bytes: int = 0
    mixed_s: float = 0.0

    def begin(self, nbytes: int, file_bytes: int = 0) -> None:
        """Count a transfer, some of it perhaps of files."""
        self.nbytes += nbytes
        self.file_bytes += file_bytes
        self.transfers += 1

    def end(self, nbytes: int, seconds: float, file_bytes: int = 0) -> None:
        """Count what it took."""
        self.timed_bytes += nbytes
        self.busy_s += seconds
        if file_bytes:
            self.mixed_bytes += nbytes
            self.timed_file_bytes += file_bytes
            self.mixed_s += seconds


class Link(Protocol):
    """Both directions between the host and one accelerator."""

    emulated: bool
    clock: Clock
    """Of the accelerator's side."""
    seams: list[int]
    """Addresses on the host, ascending, across which no single copy goes."""

    @property
    def traffic(self) -> dict[Direction, Traffic]:
        """What went each way; what transfers took comes in when they have ended, and nobody waits for that."""

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
