"""Keys and values in the memory of the model's device."""

from __future__ import annotations

from torch import Tensor

from megakv.cache.store import KVStore, Pair

GROWTH_DIVISOR = 32
"""A full buffer grows by this fraction of its length, so unused capacity stays near 3%."""
GROWTH_MINIMUM = 16


class _GrowingRows:
    """Rows of keys ``[K, n, D]`` and values ``[K, n, Dv]``: sized exactly at first, then grown by a small fraction.

    Forks share buffers until either is appended to.
    """

    def __init__(self, buffers: Pair, length: int, least_growth: int):
        self._buffers = buffers
        self._capacity = buffers[0].shape[1]
        self._least_growth = least_growth
        self._shared = False
        self.length = length

    def extend(self, rows: int) -> Pair:
        """Places of more rows, not written yet."""
        before, needed = self.length, self.length + rows
        if needed > self._capacity or self._shared:
            self._move(needed + max(self._least_growth, needed // GROWTH_DIVISOR) if before else needed)
        self.length = needed
        keys, values = self._buffers
        return keys[:, before:needed], values[:, before:needed]

    def truncate(self, length: int) -> None:
        self.length = length
        # A cut after a failure must not need more memory than it frees.
        if 2 * length < self._capacity:
            self.trim()

    def trim(self) -> None:
        """Hold no spare rows."""
        if self.length < self._capacity:
            self._move(self.length)

    def _move(self, capacity: int) -> None:
        """To buffers of one's own."""
        keys, values = (each.new_empty((each.shape[0], capacity, each.shape[2])) for each in self._buffers)
        for moved, rows in zip((keys, values), self.view(), strict=True):
            moved[:, : self.length] = rows
        self._buffers, self._capacity, self._shared = (keys, values), capacity, False

    def view(self) -> Pair:
        keys, values = self._buffers
        return keys[:, : self.length], values[:, : self.length]

    def fork(self) -> _GrowingRows:
        twin = _GrowingRows(self._buffers, self.length, self._least_growth)
        self._shared = twin._shared = True
        return twin

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)


class DenseStore(KVStore):
    """One growing buffer per sequence for keys and one for values.

    `least_growth` are the rows that a full buffer grows by at least.
    """

    def __init__(self, batch: int, least_growth: int = GROWTH_MINIMUM):
        self._least_growth = least_growth
        self._held: list[_GrowingRows | None] = [None] * batch

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        held = self._held[sequence]
        if held is None:
            keys, values = (like.new_empty((like.shape[0], 0, like.shape[2])) for like in (k_KSD, v_KSD))
            held = self._held[sequence] = _GrowingRows((keys, values), 0, self._least_growth)
        return held.extend(rows)

    def part(self, sequence: int) -> Pair:
        held = self._held[sequence]
        assert held is not None
        return held.view()

    def rows(self, sequence: int) -> int:
        held = self._held[sequence]
        return 0 if held is None else held.length

    def crop(self, sequence: int, length: int) -> None:
        held = self._held[sequence]
        if held is not None and length < held.length:
            held.truncate(length)

    def trim(self, sequence: int) -> None:
        held = self._held[sequence]
        if held is not None:
            held.trim()

    def reorder(self, index: list[int]) -> None:
        present, moved = self._held, set[int]()
        self._held = []
        for source in index:
            held = present[source]
            self._held.append(held.fork() if held is not None and source in moved else held)
            moved.add(source)

    def fork(self) -> DenseStore:
        twin = DenseStore(0, self._least_growth)
        twin._held = [held and held.fork() for held in self._held]
        return twin

    def nbytes(self) -> int:
        return sum(held.nbytes() for held in self._held if held is not None)
