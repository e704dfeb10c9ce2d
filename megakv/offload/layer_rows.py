"""The rows of all sequences of a layer: their copies are found together, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megakv.distributed.sharding import IntArray
from megakv.offload.disk import DiskTier
from megakv.offload.link import Move
from megakv.offload.paged_rows import PagedRows, Stretch
from megakv.offload.pages import Page, PagePool


@dataclass(frozen=True)
class _Table:
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

    @classmethod
    def of(cls, rows: Sequence[PagedRows | None], versions: list[object]) -> _Table:
        held = [() if paged is None else paged.joined for paged in rows]
        stretches = [stretch for own in held for stretch in own]
        on_disk = [isinstance(each.tier, DiskTier) for each in stretches]
        starts = (
            each.offset if away else each.tier.at(each.offset, each.nbytes)
            for each, away in zip(stretches, on_disk, strict=True)
        )
        table = [(each.first, each.end, start) for each, start in zip(stretches, starts, strict=True)]
        bounds = np.concatenate([[0], np.cumsum([len(own) for own in held])])
        first, end, start = np.array(table, dtype=np.int64).reshape(-1, 3).T.copy()
        return cls(versions, bounds, first, end, start, stretches, any(on_disk))


class LayerRows(list[PagedRows | None]):
    """Rows of one width of every sequence of a layer; None for one that has none yet."""

    def __init__(self, pool: PagePool, layer: int, rows: Iterable[PagedRows | None]):
        super().__init__(rows)
        self._pool, self._layer = pool, layer
        self._known: _Table | None = None

    def extend_each(
        self, sequences: Sequence[int], block: Tensor, spans: Sequence[slice], gone: Sequence[int]
    ) -> list[Move]:
        """Copies of spans of a contiguous block ``[n, W]`` to their places behind the rows of some sequences.

        `gone` are, by sequence, the rows that were gone before any came.
        """
        firsts = []
        for sequence, span in zip(sequences, spans, strict=True):
            paged = self[sequence]
            if paged is None:
                paged = PagedRows(self._pool, block.shape[1], block.dtype, layer=self._layer, gone=gone[sequence])
                self[sequence] = paged
            firsts.append(paged.extend(span.stop - span.start))
        counts = [span.stop - span.start for span in spans]
        return self.moves(block, list(zip(sequences, firsts, counts, (span.start for span in spans), strict=True)))

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
            if rows and (paged := self[number]) is not None:
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
        return LayerRows(self._pool, self._layer, [(paged := self[source]) and paged.fork() for source in index])

    def _table(self) -> _Table:
        versions: list[object] = [paged and paged.version for paged in self]
        known = self._known
        if known is None or known.versions != versions:
            known = self._known = _Table.of(self, versions)
        return known
