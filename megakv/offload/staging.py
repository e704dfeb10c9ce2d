"""A layer's cached rows on the accelerator, or on their way there, and the buffers that they are brought into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megakv.attention.together import alike, stacked
from megakv.base.device import upload
from megakv.cache.ragged_body import Body, RaggedBody
from megakv.costmodel.memory import grown_bytes
from megakv.distributed.sharding import TokenTable
from megakv.injection.recomputation import Recomputation
from megakv.offload.host_memory import host_memory
from megakv.offload.host_rank import HostPart
from megakv.offload.link import Transfer
from megakv.offload.paged_rows import Runs
from megakv.offload.record import StepRecord
from megakv.offload.row_format import RowFormat

UNPACKED_ELEMENTS = 1 << 24
"""That many are unpacked in one call, or one sequence: each takes memory while it lasts."""


class StagingBuffer:
    """Memory on a device for one layer: keys and values, packed ones, activations, and what compression kept."""

    def __init__(self, device: torch.device):
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """``[count, width]``; nothing may be under way into what was taken before."""
        nbytes = count * width * dtype.itemsize
        held = self._memory.setdefault(name, torch.empty(0, dtype=torch.uint8, device=self._device))
        if held.numel() < nbytes:
            size, on_host = grown_bytes(nbytes), self._device.type == "cpu"
            held = host_memory(size) if on_host else torch.empty(size, dtype=torch.uint8, device=self._device)
            self._memory[name] = held
        return held[:nbytes].view(dtype).view(count, width)

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self._memory.values())


class Chunk(NamedTuple):
    """Activations ``[n, h]`` that come in one transfer and are recomputed together.

    Each of `runs` are consecutive tokens of a sequence: which one, the first, and how many, as of `LayerRows.moves`.
    """

    inputs: Tensor
    runs: list[tuple[int, int, int, int]]
    transfer: Transfer


@dataclass
class StagedLayer:
    """A layer's cached rows on the accelerator, or on their way there."""

    store: RowFormat
    """The layer's store, as far as it is needed here."""
    version: int
    """Of the store when this began: what was reordered or cut since is not what was staged."""
    group: range
    """The sequences that are there; the others have no cached tokens here."""
    buffer: StagingBuffer
    rows: Tensor
    """``[n, W]`` keys and values of the sequences, with room for new tokens behind each one's cached rows."""
    starts: list[int]
    """Per sequence, as all that follows: its first row;"""
    cached: list[int]
    """cached tokens;"""
    capacity: list[int]
    """rows for new ones;"""
    splits: list[int]
    """tokens that are recomputed from activations: the first ones that do not stay away;"""
    out_of_window: list[int]
    """first tokens that the layer's window leaves out;"""
    away: list[int]
    """first tokens that stay away: those, and behind them those that the host attends to."""
    chunks: list[Chunk] = field(default_factory=list)
    streamed: Transfer | None = None
    """The transfer of all other rows."""
    packed: Tensor | None = None
    """Where rows are quantised: what has come, ``[n, nbytes]``;"""
    unpacking: list[tuple[int, int]] = field(default_factory=list)
    """of it, the first row and how many there are, one behind the other;"""
    unpacking_bodies: list[Callable[[], None]] = field(default_factory=list)
    """and what makes the bodies."""
    bodies: dict[Body, RaggedBody] = field(default_factory=dict)
    """What compression kept of the sequences, in its place; it comes with the streamed rows."""
    left: Sequence[Body] = ()
    """Or it is left to the host."""
    shared: Sequence[StagedLayer] = ()
    """The rows of each head that other ranks hold too, in the same buffer."""
    resident: int = 0
    """Tokens of all sequences that were on the accelerator already."""
    on_host: list[Runs] | None = None
    """The host's rows, where they lie; found once, before further ones are on their way to their pages."""
    host_parts: list[HostPart] = field(default_factory=list)
    """The host's attention to them, under way or over."""
    record: StepRecord | None = None
    """Of the pass that it is of use in, once its layer has begun."""

    @property
    def host_attends(self) -> bool:
        """Whether the host attends to any token."""
        here = self.away != self.out_of_window or len(self.left) > 0
        return here or any(strip.host_attends for strip in self.shared)

    def counts(self) -> dict[str, int]:
        """What becomes of its cached tokens, by the names in the report."""
        hidden = sum(self.out_of_window)
        found = {"recomputed": sum(self.splits), "on_host": sum(self.away) - hidden, "resident": self.resident}
        for name, bodies in (("kept", self.bodies), ("kept_on_host", self.left)):
            found[name] = round(sum(body.index.tokens / len(body.counts) for body in bodies))
        return {**found, "out_of_window": hidden}

    def settle(self) -> None:
        """Wait until nothing is under way into it any more."""
        # The last one first, which brings the rows of all strips: when it has ended all have, also where one failed.
        last, chunks = self.streamed, self.chunks
        self.chunks = []
        for strip in (self, *self.shared):
            strip.streamed = None
        for transfer in (last, *(chunk.transfer for chunk in reversed(chunks))):
            if transfer is not None:
                transfer.wait()

    def await_streamed(self) -> None:
        """Let attention come after all rows."""
        record = self.record
        if record is None or (self.streamed is None and record.attending is not None):
            return
        begun = record.clock.mark()
        if self.streamed is not None:
            self.streamed.wait()
            self.streamed = None
            self._unpack()
        record.arrived(begun)

    def _unpack(self) -> None:
        """Make rows of packed ones, in few calls."""
        quantiser, packed = self.store.quantiser, self.packed
        first, count = [row for row, _ in self.unpacking], [rows for _, rows in self.unpacking]
        bounds = [0, *accumulate(count)]
        for begin, end in alike(first, count) if count else ():
            assert packed is not None and quantiser is not None
            each = max(1, UNPACKED_ELEMENTS // (self.rows.shape[1] * count[begin]))
            for low in range(begin, end, each):
                high = min(low + each, end)
                target_BSW = stacked(self.rows.unsqueeze(0), first[low:high], count[low])[:, 0]
                quantiser.unpack(packed[bounds[low] : bounds[high]], target_BSW)
        # Also on a rank that has no head of its own here, and so no rows.
        for unpack in self.unpacking_bodies:
            unpack()
        self.unpacking, self.unpacking_bodies = [], []

    def recompute(self, layer: int, table: TokenTable, rank: int, recomputation: Recomputation) -> None:
        """Make keys and values of activations, chunk by chunk as they land."""
        record = self.record
        if record is None or not self.chunks:
            return
        begun = record.clock.mark()
        for chunk in self.chunks:
            chunk.transfer.wait()
            landed = record.clock.mark()
            positions = [table.positions(rank, row)[first : first + count] for row, first, count, _ in chunk.runs]
            self._put_runs(chunk.runs, recomputation.recompute(layer, chunk.inputs, np.concatenate(positions)))
            ended = record.clock.mark()
            record.recomputed(begun, landed, ended)
            begun = ended
        self.chunks = []

    def _put_runs(self, runs: Sequence[tuple[int, int, int, int]], found: tuple[Tensor, Tensor]) -> None:
        """Write the keys ``[K, L, D]`` and values of runs of tokens, in few copies."""
        first, count = [self.row(row, token) for row, token, *_ in runs], [count for _, _, count, _ in runs]
        bounds = [0, *accumulate(count)]
        for begin, end in alike(first, count):
            span = slice(bounds[begin], bounds[end])
            for buffer, rows_KLD in zip(self.store.heads_of(self.rows), found, strict=True):
                target_BKSD = stacked(buffer, first[begin:end], count[begin])
                # Heads that other ranks hold too come last.
                target_BKSD.copy_(rows_KLD[: len(buffer), span].unflatten(1, (end - begin, -1)).transpose(0, 1))

    def row(self, sequence: int, token: int) -> int:
        """Where a token of a sequence lies."""
        return self.starts[sequence] + token - self.away[sequence]

    def put(self, sequences: Sequence[int], firsts: Sequence[int], rows: Tensor) -> None:
        """Write rows ``[n, W]`` of one sequence, or one of each of several: tokens from these indices on."""
        at = [self.row(sequence, first) for sequence, first in zip(sequences, firsts, strict=True)]
        count = len(rows) // len(at)
        ends = [self.cached[sequence] + self.capacity[sequence] for sequence in sequences]
        assert all(first + count <= end for first, end in zip(firsts, ends, strict=True))
        steps = {after - before for before, after in pairwise(at)} or {1}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            self.rows[at[0] : at[-1] + count : step] = rows
        else:
            self.rows[upload(np.array(at), self.rows.device)] = rows
