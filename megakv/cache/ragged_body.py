"""The kept tokens of one sequence in one layer, head after head, as many of each as it kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.attention.compiled import RowTable, Run
from megakv.attention.varlen import KeyRuns
from megakv.base.device import upload
from megakv.base.tensor_files import StreamedTensor
from megakv.distributed.sharding import IntArray

OffsetArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class BodyIndex:
    """Which tokens the rows of a body are, one at least: head after head, ascending in each.

    A token is named by its row: its index among all tokens that this rank was given of the sequence. `counts` ``[K]``
    are the tokens of each head, `offsets` ``[n]`` the rows of all, counted from the first.
    """

    counts: IntArray
    offsets: OffsetArray
    first_row: int
    last_row: int
    _runs: dict[torch.device, KeyRuns] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, counts: IntArray, rows: IntArray) -> BodyIndex:
        first, last = int(rows.min()), int(rows.max())
        # Two bytes a token where they will do: heads of few dimensions are hardly larger.
        short, offsets = last - first < 1 << 16, rows - first
        return cls(counts, offsets.astype(np.uint16) if short else offsets.astype(np.uint32), first, last)

    @property
    def tokens(self) -> int:
        """Rows of the body."""
        return len(self.offsets)

    @property
    def rows(self) -> IntArray:
        """``[n]`` of all tokens."""
        return self.offsets.astype(np.int64) + self.first_row

    @cached_property
    def bounds(self) -> IntArray:
        """``[K + 1]`` where the tokens of each head begin and end."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    def pieces(self, head: int) -> Iterator[tuple[slice, IntArray]]:
        """Of a head's tokens, if it has any, where they lie in the body, and their rows ``[n]``."""
        first, last = self.bounds[head : head + 2].tolist()
        if last > first:
            yield slice(first, last), self.offsets[first:last].astype(np.int64) + self.first_row

    def runs_on(self, device: torch.device) -> KeyRuns:
        """The tokens of each head as a run, for kernels of a device."""
        if device not in self._runs:
            self._runs[device] = KeyRuns(self.counts, device)
        return self._runs[device]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": {}}

    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.offsets.nbytes


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


class RaggedBody(Body):
    """On one device: the keys of all tokens ``[n, D]``, row behind row, and so their values ``[n, Dv]``.

    Side by side, a token's key and its value would be read more slowly where memory is what limits attention.
    """

    def __init__(self, index: BodyIndex, k_nD: Tensor, v_nD: Tensor, block: Tensor | None = None):
        super().__init__(index)
        assert k_nD.is_contiguous() and v_nD.is_contiguous() and len(k_nD) == len(v_nD) == index.tokens
        self.k_nD, self.v_nD, self._block = k_nD, v_nD, block

    @classmethod
    def in_block(cls, index: BodyIndex, block: Tensor, key_dim: int) -> RaggedBody:
        """In one piece of memory ``[n, D + Dv]``: all keys, then all values."""
        assert block.is_contiguous()
        rows, value_dim = len(block), block.shape[1] - key_dim
        keys, values = block.view(-1).split([rows * key_dim, rows * value_dim])
        return cls(index, keys.view(rows, key_dim), values.view(rows, value_dim), block)

    @property
    def block(self) -> Tensor:
        """As `in_block`: where it lies, or a copy."""
        if self._block is None:
            return torch.cat((self.k_nD.view(-1), self.v_nD.view(-1))).view(self.index.tokens, -1)
        return self._block

    @property
    def key_dim(self) -> int:
        """Head dimension of the keys."""
        return int(self.k_nD.shape[1])

    @property
    def value_dim(self) -> int:
        """Head dimension of the values."""
        return int(self.v_nD.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tokens."""
        return self.k_nD.dtype

    @property
    def packing(self) -> None:
        """They are in that type where they lie."""
        return None

    @cached_property
    def table(self) -> IntArray:
        """``[K, 9]`` a `Run` for each head. Values without columns are the first ones of the keys."""
        pair = self.k_nD, self.v_nD if self.value_dim else self.k_nD
        table = np.zeros((len(self.counts), len(Run._fields)), dtype=np.int64)
        for column, tokens in enumerate(pair):
            before = self.index.bounds[:-1] * tokens.shape[1]
            table[:, column] = tokens.data_ptr() + before * tokens.element_size()
            table[:, 7 + column] = tokens.numel() - before
        table[:, 2], table[:, 4], table[:, 6] = self.counts, pair[0].shape[1], pair[1].shape[1]
        return table

    @cached_property
    def runs(self) -> RowTable:
        """Tokens for `DecodeKernel.ready`, each head as a sequence."""
        return RowTable.at(self.table)

    @property
    def key_runs(self) -> KeyRuns:
        """Tokens for a `VarlenKernel`."""
        return self.index.runs_on(self.k_nD.device)

    def __reduce__(self) -> tuple[Any, ...]:
        # `runs` has addresses, and views would become tensors of their own: the tokens of a copy lie elsewhere.
        return RaggedBody.in_block, (self.index, self.block, self.key_dim)

    @classmethod
    def kept(cls, k_KSD: Tensor, v_KSD: Tensor, keep_KS: Tensor, rows: IntArray) -> RaggedBody | None:
        """Copy what is kept, ``[K, S]``, of dense keys and values ``[K, S, D]``; None where nothing is."""
        heads, places = np.nonzero(keep_KS.cpu().numpy())
        if not len(heads):
            return None
        counts = np.bincount(heads, minlength=len(keep_KS)).astype(np.int64)
        where = tuple(upload(part, k_KSD.device) for part in (heads, places))
        return cls.packed(k_KSD[where], v_KSD[where], counts, rows[places])

    @classmethod
    def packed(cls, keys: Tensor, values: Tensor, counts: IntArray, rows: IntArray) -> RaggedBody | None:
        """A copy of what `flat` gives of it."""
        if not len(rows):
            return None
        block = keys.new_empty((len(rows), keys.shape[-1] + values.shape[-1]))
        body = cls.in_block(BodyIndex.of(counts, rows), block, keys.shape[-1])
        body.k_nD[:], body.v_nD[:] = keys, values
        return body

    def here(self) -> RaggedBody:
        return self

    def saved(self, slots: IntArray) -> dict[str, StreamedTensor]:
        return streamed(self.index, slots, (self.key_dim, self.value_dim), self.dtype, lambda: self)

    def pieces(self, head: int) -> Iterator[tuple[Tensor, Tensor, IntArray]]:
        """A view of ``[1, n, D]`` keys and ``[1, n, Dv]`` values, and the ``[n]`` rows of a head, if it has any."""
        for span, rows in self.index.pieces(head):
            yield self.k_nD[None, span], self.v_nD[None, span], rows

    def flat(self) -> tuple[Tensor, Tensor, IntArray]:
        """``[n, D]`` keys, ``[n, Dv]`` values and ``[n]`` rows, head after head, rows ascending in each: views."""
        return self.k_nD, self.v_nD, self.index.rows

    def below(self, row: int) -> RaggedBody | None:
        if self.index.last_row < row:
            return self
        keys, values, rows = self.flat()
        kept = rows < row
        counts = np.diff(np.concatenate([[0], np.cumsum(kept)])[self.index.bounds])
        where = upload(np.flatnonzero(kept), keys.device)
        return RaggedBody.packed(keys[where], values[where], counts, rows[kept])

    def nbytes(self) -> int:
        return self.k_nD.nbytes + self.v_nD.nbytes + self.index.nbytes()


def streamed(
    index: BodyIndex, slots: IntArray, dims: tuple[int, int], dtype: torch.dtype, load: Callable[[], RaggedBody]
) -> dict[str, StreamedTensor]:
    """What a file holds of a body, given the slots of all rows and the head dimensions of keys and values."""
    where, parts = slots[index.rows], index.counts.tolist()
    return {
        "counts": StreamedTensor.of(torch.from_numpy(index.counts)),
        "slots": StreamedTensor.of(torch.from_numpy(where)),
        "k": StreamedTensor((len(where), dims[0]), dtype, lambda: load().k_nD.split(parts)),
        "v": StreamedTensor((len(where), dims[1]), dtype, lambda: load().v_nD.split(parts)),
    }
