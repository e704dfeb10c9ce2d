"""Stores: where the keys and values of one layer lie on this rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from megakv.attention.part import KVPart, Part
from megakv.distributed.sharding import IntArray, TokenBlock
from megakv.tensor_files import StreamedTensor

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall, PartElsewhere

GROWTH_DIVISOR = 32
"""A full buffer grows by this fraction of its length, so unused room stays near 3%."""
GROWTH_MINIMUM = 16


class KVStore(Protocol):
    """Where the keys and values of one layer lie on this rank, per sequence."""

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Add rows behind the present ones of a sequence."""

    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        """``[K, n, D]`` keys and ``[K, n, Dv]`` values of a sequence, in ascending slot order.

        All rows; or the last n, where `attend_elsewhere` takes the others.
        """

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> PartElsewhere | None:
        """Begin to attend from some rank's queries to rows that `part` does not give; None where it gives all."""

    def release(self) -> None:
        """A pass has attended: what `part` gave is not read any more."""

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        """All that is held of a sequence, given the coordinates of every token that was ever appended."""

    def kept(self, sequence: int) -> IntArray:
        """``[K]`` tokens that each head holds of a sequence; empty where nothing is held."""

    def saved(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """What a saved session holds of a sequence, by name. It is read when it is written, and no copy made before."""

    def crop(self, lengths: list[int]) -> None:
        """Cut every sequence back to a number of rows."""

    def reorder(self, index: list[int]) -> None:
        """Row b becomes the present row ``index[b]``."""

    def fork(self) -> KVStore:
        """A store with the same rows; what is appended to one is not seen by the other."""

    def nbytes(self) -> int:
        """Bytes of memory held."""


@runtime_checkable
class PackingStore(Protocol):
    """A store that treats all sequences at once where it can: one by one, Python takes longer than the rest."""

    def append_each(self, sequences: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> None:
        """Add one row behind the present ones of each of some sequences, in their order."""

    def packed(self) -> tuple[Tensor, Tensor, list[int], list[int]] | None:
        """Keys ``[K, R, D]`` and values ``[K, R, Dv]`` of a buffer that holds what `part` gives of every sequence.

        With each sequence's first row in it, and how many rows it has. None where they do not lie in one buffer.
        """


class UniformStore(ABC):
    """What stores share whose tokens belong to all heads alike (see `KVStore`)."""

    @abstractmethod
    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        """See `KVStore`."""

    @abstractmethod
    def rows(self, sequence: int) -> int:
        """Rows held of a sequence."""

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        """See `KVStore`."""
        keys, values = self.part(sequence)
        # The first rows may be attended to elsewhere.
        here = slice(len(slots) - keys.shape[1], None)
        yield KVPart(sequence, keys, values, slots[here], positions[here])

    def kept(self, sequence: int) -> IntArray:
        """See `KVStore`."""
        rows = self.rows(sequence)
        return np.full(self.part(sequence)[0].shape[0] if rows else 0, rows, dtype=np.int64)

    def saved(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """See `KVStore`."""
        if not self.rows(sequence):
            return {}
        keys, values = self.part(sequence)
        return {"k": StreamedTensor.of(keys), "v": StreamedTensor.of(values)}


class _GrowingRows:
    """Rows of a ``[K, n, D]`` tensor: sized exactly at first, then grown by a small fraction.

    Forks share one buffer until either is appended to.
    """

    def __init__(self, rows: Tensor, least_growth: int = GROWTH_MINIMUM):
        self._buffer = rows.contiguous()
        self._least_growth = least_growth
        self._shared = False
        self.length = rows.shape[1]

    def append(self, rows: Tensor) -> None:
        self.extend(rows.shape[1])[:] = rows

    def extend(self, rows: int) -> Tensor:
        """Room for more rows, not written yet."""
        needed = self.length + rows
        if needed > self._buffer.shape[1] or self._shared:
            room = needed + max(self._least_growth, needed // GROWTH_DIVISOR)
            grown = self._buffer.new_empty((self._buffer.shape[0], room, self._buffer.shape[2]))
            grown[:, : self.length] = self._buffer[:, : self.length]
            self._buffer = grown
            self._shared = False
        added = self._buffer[:, self.length : needed]
        self.length = needed
        return added

    def truncate(self, length: int) -> None:
        self.length = length
        if 2 * length < self._buffer.shape[1]:
            self._buffer = self.view().clone(memory_format=torch.contiguous_format)
            self._shared = False

    def view(self) -> Tensor:
        return self._buffer[:, : self.length]

    def fork(self) -> _GrowingRows:
        twin = _GrowingRows(self._buffer, self._least_growth)
        twin.length = self.length
        self._shared = twin._shared = True
        return twin

    def nbytes(self) -> int:
        return self._buffer.numel() * self._buffer.element_size()


class DenseStore(UniformStore):
    """Keys and values in the memory of the model's device, one growing buffer per sequence.

    Parameters
    ----------
    batch : int
        Number of sequences.
    least_growth : int
        Rows that a full buffer grows by at least.
    """

    def __init__(self, batch: int, least_growth: int = GROWTH_MINIMUM):
        self._least_growth = least_growth
        self._keys: list[_GrowingRows | None] = [None] * batch
        self._values: list[_GrowingRows | None] = [None] * batch

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        keys, values = self._keys[sequence], self._values[sequence]
        if keys is None or values is None:
            # A copy, so that the projection's whole output is not kept alive by a view of it.
            for rows, new in ((self._keys, k_KSD), (self._values, v_KSD)):
                rows[sequence] = _GrowingRows(new.clone(memory_format=torch.contiguous_format), self._least_growth)
        else:
            keys.append(k_KSD)
            values.append(v_KSD)

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[sequence], self._values[sequence]
        if keys is None or values is None:
            keys, values = (
                _GrowingRows(like.new_empty((len(like), rows, like.shape[2])), self._least_growth)
                for like in (k_KSD, v_KSD)
            )
            self._keys[sequence], self._values[sequence] = keys, values
            return keys.view(), values.view()
        return keys.extend(rows), values.extend(rows)

    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[sequence], self._values[sequence]
        assert keys is not None and values is not None
        return keys.view(), values.view()

    def rows(self, sequence: int) -> int:
        """Rows held of a sequence."""
        keys = self._keys[sequence]
        return 0 if keys is None else keys.length

    def shrink(self, sequence: int, length: int) -> None:
        """Keep the first rows of a sequence, in no more memory than they need."""
        for rows in (self._keys, self._values):
            kept = rows[sequence]
            assert kept is not None
            rows[sequence] = _GrowingRows(kept.view()[:, :length].clone(), self._least_growth) if length else None

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> None:
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
        twin = DenseStore(0, self._least_growth)
        twin._keys = [None if rows is None else rows.fork() for rows in self._keys]
        twin._values = [None if rows is None else rows.fork() for rows in self._values]
        return twin

    def nbytes(self) -> int:
        return sum(rows.nbytes() for rows in (*self._keys, *self._values) if rows is not None)
