"""Stores: where the keys and values of one layer lie on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall

GROWTH_DIVISOR = 32
"""A full buffer grows by this fraction of its length, so unused room stays near 3%."""
GROWTH_MINIMUM = 16


class ElsewherePart(Protocol):
    """Attention to some rows where they lie, under way."""

    def merge_into(self, out_HLD: Tensor, lse_HL: Tensor) -> None:
        """Merge it into the attention to all other rows, in place."""


class KVStore(Protocol):
    """Where the keys and values of one layer lie on this rank, per sequence."""

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Add rows behind the present ones of a sequence."""

    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        """``[K, n, D]`` keys and ``[K, n, Dv]`` values of a sequence, in ascending slot order.

        All rows; or the last n, where `attend_elsewhere` takes the others.
        """

    def attend_elsewhere(self, call: AttentionCall) -> ElsewherePart | None:
        """Begin to attend to rows that `part` does not give; None where it gives all."""

    def release(self) -> None:
        """A pass has attended: what `part` gave is not read any more."""

    def crop(self, lengths: list[int]) -> None:
        """Cut every sequence back to a number of rows."""

    def reorder(self, index: list[int]) -> None:
        """Row b becomes the present row ``index[b]``."""

    def fork(self) -> KVStore:
        """A store with the same rows; what is appended to one is not seen by the other."""

    def nbytes(self) -> int:
        """Bytes of memory held."""


class _GrowingRows:
    """Rows of a ``[K, n, D]`` tensor: sized exactly at first, then grown by a small fraction.

    Forks share one buffer until either is appended to.
    """

    def __init__(self, rows: Tensor):
        self._buffer = rows.contiguous()
        self._shared = False
        self.length = rows.shape[1]

    def append(self, rows: Tensor) -> None:
        needed = self.length + rows.shape[1]
        if needed > self._buffer.shape[1] or self._shared:
            room = needed + max(GROWTH_MINIMUM, needed // GROWTH_DIVISOR)
            grown = rows.new_empty((rows.shape[0], room, rows.shape[2]))
            grown[:, : self.length] = self._buffer[:, : self.length]
            self._buffer = grown
            self._shared = False
        self._buffer[:, self.length : needed] = rows
        self.length = needed

    def truncate(self, length: int) -> None:
        self.length = length
        if 2 * length < self._buffer.shape[1]:
            self._buffer = self.view().clone(memory_format=torch.contiguous_format)
            self._shared = False

    def view(self) -> Tensor:
        return self._buffer[:, : self.length]

    def fork(self) -> _GrowingRows:
        twin = _GrowingRows(self._buffer)
        twin.length = self.length
        self._shared = twin._shared = True
        return twin

    def nbytes(self) -> int:
        return self._buffer.numel() * self._buffer.element_size()


class DenseStore:
    """Keys and values in the memory of the model's device, one growing buffer per sequence."""

    def __init__(self, batch: int):
        self._keys: list[_GrowingRows | None] = [None] * batch
        self._values: list[_GrowingRows | None] = [None] * batch

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        keys, values = self._keys[sequence], self._values[sequence]
        if keys is None or values is None:
            # A copy, so that the projection's whole output is not kept alive by a view of it.
            self._keys[sequence] = _GrowingRows(k_KSD.clone(memory_format=torch.contiguous_format))
            self._values[sequence] = _GrowingRows(v_KSD.clone(memory_format=torch.contiguous_format))
        else:
            keys.append(k_KSD)
            values.append(v_KSD)

    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[sequence], self._values[sequence]
        assert keys is not None and values is not None
        return keys.view(), values.view()

    def attend_elsewhere(self, call: AttentionCall) -> None:
        """Nothing lies elsewhere."""

    def release(self) -> None:
        """Everything stays where it is."""

    def crop(self, lengths: list[int]) -> None:
        for rows in (self._keys, self._values):
            for sequence, length in enumerate(lengths):
                kept = rows[sequence]
                if kept is not None and length < kept.length:
                    kept.truncate(length)

    def reorder(self, index: list[int]) -> None:
        for rows in (self._keys, self._values):
            present = list(rows)
            moved: set[int] = set()
            rows[:] = []
            for source in index:
                row = present[source]
                rows.append(row.fork() if row is not None and source in moved else row)
                moved.add(source)

    def fork(self) -> DenseStore:
        twin = DenseStore(0)
        twin._keys = [None if rows is None else rows.fork() for rows in self._keys]
        twin._values = [None if rows is None else rows.fork() for rows in self._values]
        return twin

    def nbytes(self) -> int:
        return sum(rows.nbytes() for rows in (*self._keys, *self._values) if rows is not None)
