"""Which tokens lie where in a body: every head its own number, in pages without padding.

A head's tokens are cut into as many pages of 512 as they fill, the rest into pages of 64, then 8, then 1, so that no
page is padded and all pages of one size, of whichever head, are one tensor: attention takes them as if they were heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.device import upload
from megakv.distributed.sharding import IntArray

PAGE_SIZES = (512, 64, 8, 1)
"""The largest is what PyTorch's attention is fastest with on a CPU; each divides the one before."""

OffsetArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class PageSet:
    """All pages of one size, which lie one behind the other in a body's rows from `first` on.

    The local KV head ``[P]`` of each page, ascending; the row ``[P, S]`` of each token, counted from the body's first,
    ascending in a head.
    """

    first: int
    heads: npt.NDArray[np.uint8]
    offsets: OffsetArray
    _uploaded: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def heads_on(self, device: torch.device) -> Tensor:
        """`heads` on a device."""
        if device not in self._uploaded:
            self._uploaded[device] = upload(self.heads, device).long()
        return self._uploaded[device]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_uploaded": {}}


@dataclass(frozen=True, eq=False)
class BodyIndex:
    """Which tokens the rows of a body are.

    A token is named by its row: its index among all tokens that this rank was given of the sequence. `pages` are in the
    order of `PAGE_SIZES`, one at least; `counts` ``[K]`` are the tokens of each head.
    """

    pages: tuple[PageSet, ...]
    counts: IntArray
    first_row: int
    last_row: int

    @classmethod
    def of(cls, counts: IntArray, rows: IntArray) -> tuple[BodyIndex, IntArray]:
        """Of tokens that are given head after head, one at least: the index, and the order in which they lie."""
        first, last = int(rows.min()), int(rows.max())
        # Two bytes a token where they will do: heads of few dimensions are hardly larger.
        offsets = (rows - first).astype(np.uint16 if last - first < 1 << 16 else np.uint32)
        starts = np.cumsum(counts) - counts
        sets, orders, begin = [], [], 0
        for size, heads, places in _page_starts(counts):
            order = (starts[heads] + places)[:, None] + np.arange(size)
            sets.append(PageSet(begin, heads, offsets[order]))
            orders.append(order.reshape(-1))
            begin += order.size
        return cls(tuple(sets), counts, first, last), np.concatenate(orders)

    @property
    def tokens(self) -> int:
        """Rows of the body."""
        return int(self.counts.sum())

    @cached_property
    def runs(self) -> tuple[IntArray, IntArray]:
        """Where tokens lie, head after head: the first row of each run and its rows ``[n, 2]``; the first run of each
        head ``[K + 1]``. A head's pages of one size lie side by side.
        """
        found: list[list[tuple[int, int]]] = [[] for _ in self.counts]
        for pages in self.pages:
            size = pages.offsets.shape[1]
            owners, firsts, counts = np.unique(pages.heads, return_index=True, return_counts=True)
            for head, first, count in zip(owners.tolist(), firsts.tolist(), counts.tolist(), strict=True):
                found[head].append((pages.first + first * size, count * size))
        bounds = np.cumsum([0, *map(len, found)], dtype=np.int64)
        return np.array([run for own in found for run in own], dtype=np.int64), bounds

    def pieces(self, head: int) -> Iterator[tuple[slice, IntArray]]:
        """Of a head's tokens, the rows of the body that they lie in and their own ``[n]``, for each size of page."""
        for pages in self.pages:
            first, last = np.searchsorted(pages.heads, [head, head + 1]).tolist()
            if last > first:
                size = pages.offsets.shape[1]
                rows = pages.offsets[first:last].reshape(-1).astype(np.int64) + self.first_row
                yield slice(pages.first + first * size, pages.first + last * size), rows

    def every_piece(self) -> list[tuple[slice, IntArray]]:
        """The pieces of all heads, head after head."""
        return [piece for head in range(len(self.counts)) for piece in self.pieces(head)]

    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(part.nbytes for pages in self.pages for part in (pages.heads, pages.offsets))


def _page_starts(counts: IntArray) -> Iterator[tuple[int, npt.NDArray[np.uint8], IntArray]]:
    """For every size of page that occurs: the head and the first token of each page."""
    done = np.zeros_like(counts)
    for size in PAGE_SIZES:
        number = (counts - done) // size
        heads = np.repeat(np.arange(len(counts)), number).astype(np.uint8)
        if len(heads):
            within = np.concatenate([np.arange(count) for count in number])
            yield size, heads, done[heads] + within * size
        done = done + number * size
