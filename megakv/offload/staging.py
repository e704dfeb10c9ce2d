"""Buffers on the accelerator that a layer's rows are brought into, and what is under way into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megakv.costmodel.memory import grown_bytes
from megakv.device import upload
from megakv.offload.division import Division, spread
from megakv.offload.link import Link, Move, Ticket
from megakv.offload.pages import mark_read, unwritten
from megakv.offload.pool import Page
from megakv.offload.tiers import host_memory

if TYPE_CHECKING:
    from megakv.offload.host_rank import HostRows
    from megakv.offload.store import TieredStore


class StagingBuffer:
    """Memory for the rows of one layer: keys and values, and activations.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._memory = {name: torch.empty(0, dtype=torch.uint8, device=device) for name in ("rows", "inputs", "packed")}

    def take(self, name: str, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """``[count, width]``; nothing may be under way into what was taken before."""
        nbytes = count * width * dtype.itemsize
        if self._memory[name].numel() < nbytes:
            self._memory[name] = self._taken(grown_bytes(nbytes))
        return self._memory[name][:nbytes].view(dtype).view(count, width)

    def _taken(self, nbytes: int) -> Tensor:
        if self._device.type == "cpu":
            return host_memory(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

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
    group : range
        The sequences that are there; the others have no cached tokens here.
    buffer : StagingBuffer
    rows : Tensor
        ``[n, W]`` keys and values of the sequences, with room for new tokens behind each one's cached rows.
    starts, cached, room : list of int
        Per sequence: first row, cached tokens, and room for new ones.
    splits : list of int
        Tokens recomputed from activations, per sequence: the first ones that do not stay away.
    unseen, away : list of int
        First tokens of each sequence that the layer's window leaves out; and all that stay away, those behind them that
        the host attends to included.
    chunks : list of Chunk
    streamed : Ticket, optional
        The transfer of all other rows.
    packed : list of (Tensor, Tensor)
        Where they are quantised: what comes, and the rows that it stands for.
    recomputed : bool
        Whether nothing is left to be recomputed.
    resident : int
        Tokens of all sequences that were on the accelerator already.
    """

    store: TieredStore
    version: int
    group: range
    buffer: StagingBuffer
    rows: Tensor
    starts: list[int]
    cached: list[int]
    room: list[int]
    splits: list[int]
    unseen: list[int]
    away: list[int]
    chunks: list[Chunk] = field(default_factory=list)
    streamed: Ticket | None = None
    packed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    recomputed: bool = False
    resident: int = 0
    _host_rows: HostRows | None = None

    def valid(self, new: list[int], stays: bool) -> bool:
        """Whether it is what a pass with so many new tokens per sequence needs, and with `stays` as for `begin`."""
        fits = len(new) == len(self.room) and all(new[sequence] <= self.room[sequence] for sequence in self.group)
        fits = fits and (stays or not any(self.away))
        return fits and self.version == self.store.version and self.cached == _within(self.group, self.store.lengths())

    @property
    def host_attends(self) -> bool:
        """Whether the host attends to any token."""
        return self.away != self.unseen

    def host_rows(self) -> HostRows:
        """The host's rows, where they lie; found once, before further ones are on their way to their pages."""
        if self._host_rows is None:
            spans = enumerate(zip(self.unseen, self.away, strict=True))
            self._host_rows = [self.store.rows_in_memory(sequence, end, first) for sequence, (first, end) in spans]
        return self._host_rows

    def settle(self) -> None:
        """Wait until nothing is under way into it any more."""
        tickets = [*(chunk.ticket for chunk in self.chunks), *([] if self.streamed is None else [self.streamed])]
        self.chunks, self.streamed = [], None
        # The last one first: when it has ended all have, also where one failed.
        for ticket in reversed(tickets):
            ticket.wait()

    def unpack(self) -> None:
        """Make rows of what has come in four bits."""
        for packed, rows in self.packed:
            assert self.store.quantiser is not None
            self.store.quantiser.unpack(packed, rows)
        self.packed = []

    def row(self, sequence: int, token: int) -> int:
        """Where a token of a sequence lies."""
        return self.starts[sequence] + token - self.away[sequence]

    def put(self, sequence: int, first: int, rows: Tensor) -> None:
        """Write rows of tokens from `first` on."""
        at, count = self.row(sequence, first), rows.shape[0]
        assert first + count <= self.cached[sequence] + self.room[sequence]
        self.rows[at : at + count] = rows

    def put_each(self, sequences: Sequence[int], firsts: Sequence[int], rows: Tensor) -> None:
        """Write one row ``[n, W]`` of each of some sequences: the tokens of these indices."""
        at = [self.row(sequence, first) for sequence, first in zip(sequences, firsts, strict=True)]
        assert all(first < self.cached[each] + self.room[each] for each, first in zip(sequences, firsts, strict=True))
        steps = {after - before for before, after in pairwise(at)}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            self.rows[at[0] : at[-1] + 1 : step] = rows
        else:
            self.rows[upload(np.array(at), self.rows.device)] = rows


def _within(group: range, counts: Sequence[int]) -> list[int]:
    """Counts per sequence, 0 for those outside a group."""
    return [count if sequence in group else 0 for sequence, count in enumerate(counts)]


def bring(
    store: TieredStore,
    group: range,
    buffer: StagingBuffer,
    link: Link,
    division: Division,
    new: list[int],
    *,
    chunk: int,
    unseen: Sequence[int],
) -> StagedLayer:
    """Begin to bring a layer's rows.

    Parameters
    ----------
    store : TieredStore
        Of the layer; everything appended to it was sent to its tier.
    group : range
        The sequences whose rows are wanted.
    buffer : StagingBuffer
        Nothing may be under way into it.
    link : Link
    division : Division
        Of the group's cached tokens, in the mean of all layers.
    new : list of int
        Per sequence, tokens that room is left for.
    chunk : int
        Tokens of a chunk of activations.
    unseen : sequence of int
        First tokens of each sequence that the layer's window leaves out.
    """
    cached, new, unseen = _within(group, store.settled()), _within(group, new), _within(group, unseen)
    if any(unseen) or sum(cached) != division.tokens:
        division = division.of_tokens(sum(cached) - sum(unseen))
    # A later layer may have more on disk than the one that was divided.
    memory = [max(0, min(each) - first) for first, *each in zip(unseen, store.in_memory(), cached, strict=True)]
    on_host = spread(min(division.on_host, sum(memory)), memory)
    away = [first + count for first, count in zip(unseen, on_host, strict=True)]
    inputs = [max(0, min(each) - first) for first, *each in zip(away, store.with_inputs(), cached, strict=True)]
    splits = spread(min(division.recomputed, sum(inputs)), inputs)
    sizes = [count - first + room for count, first, room in zip(cached, away, new, strict=True)]
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    rows = buffer.take("rows", starts[-1], store.row_width, store.dtype)
    staged = StagedLayer(store, store.version, group, buffer, rows, starts[:-1], cached, new, splits, unseen, away)
    if sum(splits):
        _bring_inputs(staged, link, sum(splits), chunk)
    packed, filled = None, 0
    if store.quantiser is not None:
        streamed = sum(cached) - sum(away) - sum(splits)
        packed = buffer.take("packed", streamed, store.stored_width, store.stored_dtype)
    moves: list[Move] = []
    pending: dict[int, Ticket] = {}
    read: list[Page] = []
    for sequence, count in enumerate(cached):
        begin = away[sequence] + splits[sequence]
        spans = [(begin, count)]
        resident = store.resident(sequence) if count else None
        if resident is not None and begin < resident.end:
            kept = max(begin, resident.first)
            spans = [(begin, kept), (resident.end, count)]
            staged.resident += resident.end - kept
            rows[staged.row(sequence, kept) : staged.row(sequence, resident.end)] = resident.rows[
                kept - resident.first :
            ]
        for first, last in spans:
            if first < last:
                target = rows[staged.row(sequence, first) : staged.row(sequence, last)]
                if packed is not None:
                    staged.packed.append((packed[filled : filled + last - first], target))
                    target, filled = staged.packed[-1][0], filled + last - first
                found, pages = store.row_moves(sequence, first, target)
                moves += found
                read += pages
                pending.update((id(ticket), ticket) for ticket in unwritten(pages))
    if moves:
        staged.streamed = link.start("in", moves, after=list(pending.values()))
        mark_read(read, staged.streamed)
    return staged


def _bring_inputs(staged: StagedLayer, link: Link, total: int, size: int) -> None:
    """Begin to bring activations, a transfer for each chunk."""
    store = staged.store
    inputs = staged.buffer.take("inputs", total, store.input_width, store.dtype)
    pieces: list[Piece] = []
    filled = begun = 0
    for sequence, split in enumerate(staged.splits):
        first = staged.away[sequence]
        last = first + split
        while first < last:
            count = min(last - first, size - (filled - begun))
            pieces.append(Piece(sequence, first, count))
            first, filled = first + count, filled + count
            if filled - begun == size or filled == total:
                staged.chunks.append(_send_inputs(store, link, inputs[begun:filled], tuple(pieces)))
                pieces, begun = [], filled


def _send_inputs(store: TieredStore, link: Link, inputs: Tensor, pieces: tuple[Piece, ...]) -> Chunk:
    moves: list[Move] = []
    pending: dict[int, Ticket] = {}
    read: list[Page] = []
    at = 0
    for piece in pieces:
        found, pages = store.input_moves(piece.sequence, piece.first, inputs[at : at + piece.count])
        moves += found
        read += pages
        pending.update((id(ticket), ticket) for ticket in unwritten(pages))
        at += piece.count
    ticket = link.start("in", moves, after=list(pending.values()))
    mark_read(read, ticket)
    return Chunk(inputs, pieces, ticket)
