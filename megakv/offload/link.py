"""The link between host and accelerator: transfers of rows that run beside computation, in order in each direction.

`cuda_link.py` uses a stream for each direction, `thread_link.py` emulates a link where there is no accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

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
