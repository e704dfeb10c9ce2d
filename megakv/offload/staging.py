"""Buffers on the accelerator that a layer's rows are brought into, and what is under way into them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megakv.offload.link import Ticket

if TYPE_CHECKING:
    from megakv.offload.store import TieredStore

SLACK_DIVISOR = 16
"""A buffer that is too small grows by this fraction more than needed."""


class StagingBuffer:
    """Memory for the rows of one layer: keys and values, and activations.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._memory = {name: torch.empty(0, dtype=torch.uint8, device=device) for name in ("rows", "inputs")}

    def take(self, name: str, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """``[count, width]``; nothing may be under way into what was taken before."""
        nbytes = count * width * dtype.itemsize
        if self._memory[name].numel() < nbytes:
            self._memory[name] = torch.empty(nbytes + nbytes // SLACK_DIVISOR, dtype=torch.uint8, device=self._device)
        return self._memory[name][:nbytes].view(dtype).view(count, width)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(memory.numel() for memory in self._memory.values())


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sequence in a chunk of activations.

    Parameters
    ----------
    sequence, first, count : int
        Batch row, first token, and how many.
    """

    sequence: int
    first: int
    count: int


@dataclass(frozen=True)
class Chunk:
    """Activations that come in one transfer and are recomputed together.

    Parameters
    ----------
    inputs : Tensor
        ``[n, h]``.
    pieces : tuple of Piece
        Whose they are, in order.
    ticket : Ticket
    """

    inputs: Tensor
    pieces: tuple[Piece, ...]
    ticket: Ticket


@dataclass
class StagedLayer:
    """A layer's cached rows on the accelerator, or on their way there.

    Parameters
    ----------
    store : TieredStore
    version : int
        Of the store when this began: what was reordered or cut since is not what was staged.
    buffer : StagingBuffer
    rows : Tensor
        ``[n, W]`` keys and values of all sequences, with room for new tokens behind each one's cached rows.
    starts, cached, room : list of int
        Per sequence: first row, cached tokens, and room for new ones.
    splits : list of int
        Tokens recomputed from activations, per sequence.
    chunks : list of Chunk
    streamed : Ticket, optional
        The transfer of all other rows.
    """

    store: TieredStore
    version: int
    buffer: StagingBuffer
    rows: Tensor
    starts: list[int]
    cached: list[int]
    room: list[int]
    splits: list[int]
    chunks: list[Chunk] = field(default_factory=list)
    streamed: Ticket | None = None
    recomputed: bool = False

    def valid(self, new: list[int]) -> bool:
        """Whether it is what a pass with so many new tokens per sequence needs."""
        fits = len(new) == len(self.room) and all(n <= room for n, room in zip(new, self.room, strict=True))
        return fits and self.version == self.store.version and self.cached == self.store.lengths()

    def settle(self) -> None:
        """Wait until nothing is under way into it any more."""
        for ticket in (*(chunk.ticket for chunk in self.chunks), self.streamed):
            if ticket is not None:
                ticket.wait()

    def row(self, sequence: int, token: int) -> int:
        """Where a token of a sequence lies."""
        return self.starts[sequence] + token

    def put(self, sequence: int, first: int, rows: Tensor) -> None:
        """Write rows of tokens from `first` on."""
        at = self.row(sequence, first)
        assert first + len(rows) <= self.cached[sequence] + self.room[sequence]
        self.rows[at : at + len(rows)] = rows
