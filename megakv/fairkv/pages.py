"""The kept tokens of one sequence in one layer: every head its own number, in pages without padding.

A head's tokens are cut into as many pages of 512 as they fill, the rest into pages of 64, then 8, then 1, so that no
page is padded and all pages of one size, of whichever head, are one tensor: attention takes them as if they were heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.attention.compiled import Run, RunTable
from megakv.device import upload
from megakv.distributed.sharding import IntArray
from megakv.tensor_files import StreamedTensor

PAGE_SIZES = (512, 64, 8, 1)
"""The largest is what PyTorch's attention is fastest with on a CPU; each divides the one before."""

OffsetArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Pages:
    """All pages of one size.

    Keys ``[P, S, D]`` and values ``[P, S, Dv]``; the local KV head ``[P]`` of each page, ascending; the row ``[P, S]``
    of each token, counted from the body's first, ascending in a head.
    """

    k_PSD: Tensor
    v_PSD: Tensor
    heads: npt.NDArray[np.uint8]
    offsets: OffsetArray

    @cached_property
    def heads_P(self) -> Tensor:
        """`heads` on the device of the keys."""
        return upload(self.heads, self.k_PSD.device).long()


@dataclass(frozen=True, eq=False)
class RaggedBody:
    """Tokens that were kept of one sequence in one layer. Never changed once made, so that copies share it.

    A token is named by its row: its index among all tokens that this rank was given of the sequence. `pages` are in the
    order of `PAGE_SIZES`, one at least; `counts` ``[K]`` are the tokens of each head.
    """

    pages: tuple[Pages, ...]
    counts: IntArray
    first_row: int
    last_row: int

    @cached_property
    def runs(self) -> RunTable:
        """Tokens for `DecodeKernel.ready`, each head as a sequence: a head's pages of one size lie side by side.

        Values without columns are the first ones of the keys.
        """
        runs: list[list[Run]] = [[] for _ in self.counts]
        for pages in self.pages:
            keys, values = pages.k_PSD, pages.v_PSD if pages.v_PSD.shape[2] else pages.k_PSD
            assert keys.is_contiguous() and values.is_contiguous()
            tokens, strides = keys.shape[1], (0, keys.shape[2], 0, values.shape[2])
            k, v = keys.data_ptr(), values.data_ptr()
            k_bytes, v_bytes = (each[0].nbytes for each in (keys, values))
            owners, firsts, counts = np.unique(pages.heads, return_index=True, return_counts=True)
            for head, first, count in zip(owners.tolist(), firsts.tolist(), counts.tolist(), strict=True):
                runs[head].append(Run(k + first * k_bytes, v + first * v_bytes, count * tokens, *strides))
        return RunTable.of(runs)

    def __getstate__(self) -> dict[str, Any]:
        # `runs` has addresses: the tokens of a copy lie elsewhere.
        return {name: value for name, value in self.__dict__.items() if name != "runs"}

    @classmethod
    def kept(cls, k_KSD: Tensor, v_KSD: Tensor, keep_KS: Tensor, rows: IntArray) -> RaggedBody | None:
        """Copy what is kept, ``[K, S]``, of dense keys and values ``[K, S, D]``; None where nothing is."""
        heads, places = np.nonzero(keep_KS.cpu().numpy())
        counts = np.bincount(heads, minlength=len(keep_KS)).astype(np.int64)
        return cls._paged(k_KSD, v_KSD, counts, (heads, places), rows[places])

    @classmethod
    def packed(cls, keys: Tensor, values: Tensor, counts: IntArray, rows: IntArray) -> RaggedBody | None:
        """The inverse of `flat`."""
        return cls._paged(keys, values, counts, (np.arange(len(rows)),), rows)

    def saved(self, slots: IntArray) -> dict[str, StreamedTensor]:
        """What a file holds of it, given the slots of all rows."""
        heads = range(len(self.counts))
        rows = np.concatenate([rows for head in heads for _, _, rows in self.pieces(head)])

        def streamed(get: Callable[[tuple[Tensor, Tensor, IntArray]], Tensor], like: Tensor) -> StreamedTensor:
            return StreamedTensor(
                (len(rows), like.shape[2]),
                like.dtype,
                lambda: (get(piece) for head in heads for piece in self.pieces(head)),
            )

        return {
            "counts": StreamedTensor.of(torch.from_numpy(self.counts)),
            "slots": StreamedTensor.of(torch.from_numpy(slots[rows])),
            "k": streamed(lambda piece: piece[0], self.pages[0].k_PSD),
            "v": streamed(lambda piece: piece[1], self.pages[0].v_PSD),
        }

    @classmethod
    def _paged(
        cls, keys: Tensor, values: Tensor, counts: IntArray, index: tuple[IntArray, ...], rows: IntArray
    ) -> RaggedBody | None:
        """Cut tokens, head after head, into pages; `index` says where each one lies in `keys` and `values`."""
        if not len(rows):
            return None
        first, last = int(rows.min()), int(rows.max())
        # Two bytes a token where they will do: heads of few dimensions are hardly larger.
        offsets = (rows - first).astype(np.uint16 if last - first < 1 << 16 else np.uint32)
        starts = np.cumsum(counts) - counts
        sets = []
        for size, heads, places in _page_starts(counts):
            order = (starts[heads] + places)[:, None] + np.arange(size)
            where = tuple(upload(part[order], keys.device) for part in index)
            sets.append(Pages(keys[where], values[where], heads, offsets[order]))
        return cls(tuple(sets), counts, first, last)

    def pieces(self, head: int) -> Iterator[tuple[Tensor, Tensor, IntArray]]:
        """``[1, n, D]`` keys, ``[1, n, Dv]`` values and ``[n]`` rows of a head, a view for each size of page."""
        for page in self.pages:
            first, last = np.searchsorted(page.heads, [head, head + 1])
            if last > first:
                yield (
                    page.k_PSD[first:last].flatten(0, 1)[None],
                    page.v_PSD[first:last].flatten(0, 1)[None],
                    page.offsets[first:last].reshape(-1).astype(np.int64) + self.first_row,
                )

    def flat(self) -> tuple[Tensor, Tensor, IntArray]:
        """``[n, D]`` keys, ``[n, Dv]`` values and ``[n]`` rows, head after head, rows ascending in each."""
        pieces = [piece for head in range(len(self.counts)) for piece in self.pieces(head)]
        return (
            torch.cat([keys[0] for keys, _, _ in pieces]),
            torch.cat([values[0] for _, values, _ in pieces]),
            np.concatenate([rows for _, _, rows in pieces]),
        )

    def below(self, row: int) -> RaggedBody | None:
        """The tokens before a row; None where there are none."""
        if self.last_row < row:
            return self
        keys, values, rows = self.flat()
        kept = rows < row
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        counts = np.bincount(owner[kept], minlength=len(self.counts)).astype(np.int64)
        index = upload(np.flatnonzero(kept), keys.device)
        return RaggedBody.packed(keys[index], values[index], counts, rows[kept])

    def nbytes(self) -> int:
        """Bytes held, coordinates included."""
        return sum(part.nbytes for page in self.pages for part in (page.k_PSD, page.v_PSD, page.heads, page.offsets))


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
