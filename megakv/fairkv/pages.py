"""The kept tokens of one sequence in one layer, in pages of every head (see `page_index.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megakv.attention.compiled import RunTable
from megakv.device import upload
from megakv.distributed.sharding import IntArray
from megakv.fairkv.page_index import BodyIndex
from megakv.tensor_files import StreamedTensor


class Body(ABC):
    """Tokens that were kept of one sequence in one layer, wherever they lie. Never changed once made, so that copies
    share it.
    """

    def __init__(self, index: BodyIndex):
        self.index = index

    @property
    def counts(self) -> IntArray:
        """``[K]`` tokens of each head."""
        return self.index.counts

    @abstractmethod
    def here(self) -> RaggedBody:
        """Its tokens where the model computes."""

    @abstractmethod
    def below(self, row: int) -> Body | None:
        """The tokens before a row; None where there are none."""

    @abstractmethod
    def saved(self, slots: IntArray) -> dict[str, StreamedTensor]:
        """What a file holds of it, given the slots of all rows."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, coordinates included."""


@dataclass(frozen=True)
class Pages:
    """Keys ``[P, S, D]`` and values ``[P, S, Dv]`` of all pages of one size, and the local KV head ``[P]`` of each."""

    k_PSD: Tensor
    v_PSD: Tensor
    heads_P: Tensor


class RaggedBody(Body):
    """On one device, in one `block` of its memory ``[n, D + Dv]``: the keys of all tokens, then their values.

    Side by side, a token's key and its value would be read more slowly where memory is what limits attention.
    """

    def __init__(self, index: BodyIndex, block: Tensor, key_dim: int):
        super().__init__(index)
        assert block.is_contiguous() and len(block) == index.tokens
        self.block, self.key_dim = block, key_dim
        keys, values = block.view(-1).split([len(block) * key_dim, len(block) * self.value_dim])
        self.k_nD, self.v_nD = keys.view(len(block), key_dim), values.view(len(block), self.value_dim)

    @property
    def value_dim(self) -> int:
        """Head dimension of the values."""
        return int(self.block.shape[1]) - self.key_dim

    @cached_property
    def pages(self) -> tuple[Pages, ...]:
        """Views of its tokens."""
        found = []
        for pages in self.index.pages:
            span, shape = slice(pages.first, pages.first + pages.offsets.size), pages.offsets.shape
            k_PSD, v_PSD = (each[span].unflatten(0, shape) for each in (self.k_nD, self.v_nD))
            found.append(Pages(k_PSD, v_PSD, pages.heads_on(self.block.device)))
        return tuple(found)

    @cached_property
    def runs(self) -> RunTable:
        """Tokens for `DecodeKernel.ready`, each head as a sequence. Values without columns are the first ones of the
        keys.
        """
        runs, bounds = self.index.runs
        pair = self.k_nD, self.v_nD if self.value_dim else self.k_nD
        table = np.empty((len(runs), 7), dtype=np.int64)
        for column, tokens in enumerate(pair):
            table[:, column] = tokens.data_ptr() + runs[:, 0] * (tokens.shape[1] * tokens.element_size())
        table[:, 2] = runs[:, 1]
        table[:, 3:] = 0, pair[0].shape[1], 0, pair[1].shape[1]
        return RunTable(table, bounds)

    def __reduce__(self) -> tuple[Any, ...]:
        # `runs` has addresses, and views would become tensors of their own: the tokens of a copy lie elsewhere.
        return type(self), (self.index, self.block, self.key_dim)

    @classmethod
    def kept(cls, k_KSD: Tensor, v_KSD: Tensor, keep_KS: Tensor, rows: IntArray) -> RaggedBody | None:
        """Copy what is kept, ``[K, S]``, of dense keys and values ``[K, S, D]``; None where nothing is."""
        heads, places = np.nonzero(keep_KS.cpu().numpy())
        if not len(heads):
            return None
        counts = np.bincount(heads, minlength=len(keep_KS)).astype(np.int64)
        index, order = BodyIndex.of(counts, rows[places])
        return cls._of(index, k_KSD, v_KSD, tuple(upload(part[order], k_KSD.device) for part in (heads, places)))

    @classmethod
    def packed(cls, keys: Tensor, values: Tensor, counts: IntArray, rows: IntArray) -> RaggedBody | None:
        """The inverse of `flat`."""
        if not len(rows):
            return None
        index, order = BodyIndex.of(counts, rows)
        return cls._of(index, keys, values, (upload(order, keys.device),))

    @classmethod
    def _of(cls, index: BodyIndex, keys: Tensor, values: Tensor, where: tuple[Tensor, ...]) -> RaggedBody:
        """Copy the tokens of an index, given where each is in `keys` and `values`."""
        body = cls(index, keys.new_empty((index.tokens, keys.shape[-1] + values.shape[-1])), keys.shape[-1])
        body.k_nD[:], body.v_nD[:] = keys[where], values[where]
        return body

    def here(self) -> RaggedBody:
        return self

    def saved(self, slots: IntArray) -> dict[str, StreamedTensor]:
        return streamed(self.index, slots, (self.key_dim, self.value_dim), self.block.dtype, lambda: self)

    def pieces(self, head: int) -> Iterator[tuple[Tensor, Tensor, IntArray]]:
        """``[1, n, D]`` keys, ``[1, n, Dv]`` values and ``[n]`` rows of a head, a view for each size of page."""
        for span, rows in self.index.pieces(head):
            yield self.k_nD[None, span], self.v_nD[None, span], rows

    def flat(self) -> tuple[Tensor, Tensor, IntArray]:
        """``[n, D]`` keys, ``[n, Dv]`` values and ``[n]`` rows, head after head, rows ascending in each."""
        spans, rows = zip(*self.index.every_piece(), strict=True)
        keys, values = (torch.cat([each[span] for span in spans]) for each in (self.k_nD, self.v_nD))
        return keys, values, np.concatenate(rows)

    def below(self, row: int) -> RaggedBody | None:
        if self.index.last_row < row:
            return self
        keys, values, rows = self.flat()
        kept = rows < row
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        counts = np.bincount(owner[kept], minlength=len(self.counts)).astype(np.int64)
        where = upload(np.flatnonzero(kept), keys.device)
        return RaggedBody.packed(keys[where], values[where], counts, rows[kept])

    def nbytes(self) -> int:
        return self.block.nbytes + self.index.nbytes()


def streamed(
    index: BodyIndex, slots: IntArray, dims: tuple[int, int], dtype: torch.dtype, load: Callable[[], RaggedBody]
) -> dict[str, StreamedTensor]:
    """What a file holds of a body, given the slots of all rows and the head dimensions of keys and values."""
    spans, rows = zip(*index.every_piece(), strict=True)
    where = slots[np.concatenate(rows)]

    def of_keys() -> Iterator[Tensor]:
        keys = load().k_nD
        return (keys[span] for span in spans)

    def of_values() -> Iterator[Tensor]:
        values = load().v_nD
        return (values[span] for span in spans)

    return {
        "counts": StreamedTensor.of(torch.from_numpy(index.counts)),
        "slots": StreamedTensor.of(torch.from_numpy(where)),
        "k": StreamedTensor((len(where), dims[0]), dtype, of_keys),
        "v": StreamedTensor((len(where), dims[1]), dtype, of_values),
    }
