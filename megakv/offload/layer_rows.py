"""The rows of all sequences of a layer: their copies are found together, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megakv.distributed.sharding import IntArray
from megakv.offload.disk import DiskTier
from megakv.offload.link import Move
from megakv.offload.paged_rows import PagedRows, Stretch
from megakv.offload.pages import Page


class _Table(NamedTuple):
    """Where the rows of all sequences lie: stretch by stretch, those of sequence ``i`` from ``bounds[i]`` on.

    A stretch has rows from `first` up to `end`, and begins at an address, or, of a tier on disk, at a byte of its file;
    `disk` says whether any does.
    """

    versions: list[object]
    bounds: IntArray
    first: IntArray
    end: IntArray
    start: IntArray
    stretches: list[Stretch]
    disk: bool


class LayerRows(list[PagedRows]):
    """Rows of one width of every sequence of a layer."""

    def __init__(self, rows: Iterable[PagedRows]):
        super().__init__(rows)
        self._known: _Table | None = None

    def extend_each(self, sequences: Sequence[int], block: Tensor, spans: Sequence[slice]) -> list[Move]:
        """Copies of spans of a contiguous block ``[n, W]`` to their places behind the rows of some sequences."""
        runs = []
        for sequence, span in zip(sequences, spans, strict=True):
            paged, count = self[sequence], span.stop - span.start
            if not paged.known:
                paged.set_format(block.shape[1], block.dtype)
            runs.append((sequence, paged.extend(count), count, span.start))
        return self.moves(block, runs)

    def moves(self, block: Tensor, runs: Sequence[tuple[int, int, int, int]]) -> list[Move]:
        """Copies between tokens and rows of a contiguous block ``[n, W]``.

        Each of `runs` has a sequence, its first token, how many they are, and the first one's row in the block.
        """
        sequence, first, count, row = np.array(runs, dtype=np.int64).reshape(-1, 4).T
        if not block.shape[1] or not count.any():
            return []
        assert block.is_contiguous() and (row >= 0).all() and (row + count <= block.shape[0]).all()
        table, row_bytes = self._table(), block.shape[1] * block.itemsize
        # Each run meets all stretches of its sequence; those that have none of its rows drop out.
        low = table.bounds[sequence]
        each = table.bounds[sequence + 1] - low
        run = np.repeat(np.arange(len(sequence)), each)
        index = np.arange(len(run)) + np.repeat(low - np.cumsum(each) + each, each)
        begin = np.maximum(table.first[index], first[run])
        end = np.minimum(table.end[index], (first + count)[run])
        inside = begin < end
        run, index, begin, end = run[inside], index[inside], begin[inside], end[inside]
        host = table.start[index] + (begin - table.first[index]) * row_bytes
        device = block.data_ptr() + (row[run] + begin - first[run]) * row_bytes
        sizes, holds = (end - begin) * row_bytes, (block,)
        assert sizes.sum() == count.sum() * row_bytes
        places: list[Page] = []
        for number, begins, rows, _ in runs:
            if rows:
                paged = self[number]
                assert paged.width == block.shape[1] and paged.dtype == block.dtype
                places += paged.pages_of(begins, rows)
        if not table.disk:
            return [Move(host, device, sizes, places, holds)]
        moves = []
        for at, stretch in enumerate(index):
            tier, here = table.stretches[stretch].tier, slice(at, at + 1)
            there = tier.at(int(host[at]), int(sizes[at])) if isinstance(tier, DiskTier) else host[here]
            moves.append(Move(there, device[here], sizes[here], () if at else places, holds))
        return moves

    def fork(self, index: Sequence[int]) -> LayerRows:
        """Those of some sequences; what is appended to one is not seen by the other."""
        return LayerRows(self[source].fork() for source in index)

    def _table(self) -> _Table:
        versions: list[object] = [paged.version for paged in self]
        known = self._known
        if known is None or known.versions != versions:
            stretches = [stretch for paged in self for stretch in paged.joined]
            table, disk = [], False
            for each in stretches:
                away = isinstance(each.tier, DiskTier)
                begin = each.offset if away else each.tier.at(each.offset, each.nbytes)
                table.append((each.first, each.end, begin))
                disk = disk or away
            bounds = np.concatenate([[0], np.cumsum([len(paged.joined) for paged in self])])
            first, end, start = np.array(table, dtype=np.int64).reshape(-1, 3).T.copy()
            known = self._known = _Table(versions, bounds, first, end, start, stretches, disk)
        return known
