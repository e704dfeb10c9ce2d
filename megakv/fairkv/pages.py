"""The kept tokens of one sequence in one layer: every head its own number, in pages without padding.

A head's tokens are cut into as many pages of 512 as they fill, the rest into pages of 64, then 8, then 1, so that no
page is padded and all pages of one size, of whichever head, are one tensor: attention takes them as if they were heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.sharding import IntArray

PAGE_SIZES = (512, 64, 8, 1)
"""The largest is what attention is fastest with on a CPU; each divides the one before."""

RowArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Pages:
    """All pages of one size.

    Parameters
    ----------
    k_PSD, v_PSD : Tensor
        ``[P, S, D]`` and ``[P, S, Dv]`` keys and values.
    heads : IntArray
        ``[P]`` local KV head of each page, ascending.
    rows : RowArray
        ``[P, S]`` which of this rank's tokens of the sequence each one is; ascending in a page and from page to page.
    """

    k_PSD: Tensor
    v_PSD: Tensor
    heads: IntArray
    rows: RowArray

    @cached_property
    def heads_P(self) -> Tensor:
        """`heads` on the device of the keys."""
        return torch.from_numpy(self.heads).to(self.k_PSD.device)

    def nbytes(self) -> int:
        """Bytes held, coordinates included."""
        tensors = self.k_PSD.numel() * self.k_PSD.element_size() + self.v_PSD.numel() * self.v_PSD.element_size()
        return tensors + self.rows.nbytes + self.heads.nbytes


class RaggedBody:
    """Tokens that were kept of one sequence in one layer. Never changed once made, so that copies share it.

    Parameters
    ----------
    pages : sequence of Pages
        In the order of `PAGE_SIZES`, sizes without a page left out. At least one.
    counts : IntArray
        ``[K]`` tokens of each head.
    """

    def __init__(self, pages: Sequence[Pages], counts: IntArray):
        self.pages = tuple(pages)
        self.counts = counts
        self.first_row = min(int(page.rows.min()) for page in self.pages)
        self.last_row = max(int(page.rows.max()) for page in self.pages)

    @classmethod
    def kept(cls, k_KSD: Tensor, v_KSD: Tensor, keep_KS: Tensor, rows: IntArray) -> RaggedBody | None:
        """Copy what is kept of dense keys and values; None where nothing is.

        Parameters
        ----------
        k_KSD, v_KSD : Tensor
            ``[K, S, D]`` and ``[K, S, Dv]``.
        keep_KS : Tensor
            ``[K, S]`` bool.
        rows : IntArray
            ``[S]`` which of this rank's tokens of the sequence each one is.
        """
        keep = keep_KS.cpu().numpy()
        chosen = [np.flatnonzero(mask) for mask in keep]
        counts = np.array([len(index) for index in chosen], dtype=np.int64)
        sets = []
        for size, heads, places in _paged(counts):
            index = np.stack([chosen[head][start : start + size] for head, start in zip(heads, places, strict=True)])
            where = torch.from_numpy(heads)[:, None].to(k_KSD.device), torch.from_numpy(index).to(k_KSD.device)
            sets.append(Pages(k_KSD[where], v_KSD[where], heads, rows[index].astype(np.int32)))
        return cls(sets, counts) if sets else None

    @classmethod
    def packed(cls, keys: Tensor, values: Tensor, counts: IntArray, rows: IntArray) -> RaggedBody | None:
        """The inverse of `flat`."""
        starts = np.concatenate([[0], np.cumsum(counts)])
        sets = []
        for size, heads, places in _paged(counts):
            index = (starts[heads] + places)[:, None] + np.arange(size)
            where = torch.from_numpy(index).to(keys.device)
            sets.append(Pages(keys[where], values[where], heads, rows[index].astype(np.int32)))
        return cls(sets, counts) if sets else None

    def pieces(self, head: int) -> Iterator[tuple[Tensor, Tensor, RowArray]]:
        """``[1, n, D]`` keys, ``[1, n, Dv]`` values and ``[n]`` rows of a head, a view for each size of page."""
        for page in self.pages:
            first, last = np.searchsorted(page.heads, [head, head + 1])
            if last > first:
                yield (
                    page.k_PSD[first:last].flatten(0, 1)[None],
                    page.v_PSD[first:last].flatten(0, 1)[None],
                    page.rows[first:last].reshape(-1),
                )

    def flat(self) -> tuple[Tensor, Tensor, IntArray]:
        """``[n, D]`` keys, ``[n, Dv]`` values and ``[n]`` rows, head after head, rows ascending in each."""
        pieces = [piece for head in range(len(self.counts)) for piece in self.pieces(head)]
        return (
            torch.cat([keys[0] for keys, _, _ in pieces]),
            torch.cat([values[0] for _, values, _ in pieces]),
            np.concatenate([rows for _, _, rows in pieces]).astype(np.int64),
        )

    def below(self, row: int) -> RaggedBody | None:
        """The tokens before a row; None where there are none."""
        if self.last_row < row:
            return self
        keys, values, rows = self.flat()
        kept = rows < row
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        counts = np.bincount(owner[kept], minlength=len(self.counts)).astype(np.int64)
        index = torch.from_numpy(np.flatnonzero(kept)).to(keys.device)
        return RaggedBody.packed(keys[index], values[index], counts, rows[kept])

    def nbytes(self) -> int:
        """Bytes held, coordinates included."""
        return sum(page.nbytes() for page in self.pages)


def _paged(counts: IntArray) -> Iterator[tuple[int, IntArray, IntArray]]:
    """For every size of page that occurs: the head and the first token of each page."""
    done = np.zeros_like(counts)
    for size in PAGE_SIZES:
        number = (counts - done) // size
        heads = np.repeat(np.arange(len(counts)), number)
        if len(heads):
            within = np.concatenate([np.arange(count) for count in number])
            yield size, heads, done[heads] + within * size
        done = done + number * size
