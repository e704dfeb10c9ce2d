"""Keys and values in the memory of the model's device."""

from __future__ import annotations

from torch import Tensor

from megakv.cache.store import KVStore, Pair

GROWTH_DIVISOR = 32
"""A full buffer grows by this fraction of its length, so unused capacity stays near 3%."""
GROWTH_MINIMUM = 16


class _GrowingRows:
    """Rows of a ``[K, n, D]`` tensor: sized exactly at first, then grown by a small fraction.

    Forks share one buffer until either is appended to.
    """

    def __init__(self, like: Tensor, least_growth: int):
        self._buffer = like.new_empty((like.shape[0], 0, like.shape[2]))
        self._least_growth = least_growth
        self._shared = False
        self.length = 0

    def extend(self, rows: int) -> Tensor:
        """Places of more rows, not written yet."""
        needed = self.length + rows
        if needed > self._buffer.shape[1] or self._shared:
            self._move(needed + self._growth(needed) if self.length else needed)
        added = self._buffer[:, self.length : needed]
        self.length = needed
        return added

    def truncate(self, length: int) -> None:
        self.length = length
        # A cut after a failure must not need more memory than it frees.
        if 2 * length < self._buffer.shape[1]:
            self._move(length)

    def trim(self) -> None:
        """Hold no spare rows."""
        if self.length < self._buffer.shape[1]:
            self._move(self.length)

    def _growth(self, length: int) -> int:
        return max(self._least_growth, length // GROWTH_DIVISOR)

    def _move(self, capacity: int) -> None:
        """To a buffer of one's own."""
        moved = self._buffer.new_empty((self._buffer.shape[0], capacity, self._buffer.shape[2]))
        moved[:, : self.length] = self.view()
        self._buffer, self._shared = moved, False

    def view(self) -> Tensor:
        return self._buffer[:, : self.length]

    def fork(self) -> _GrowingRows:
        twin = _GrowingRows(self._buffer, self._least_growth)
        twin._buffer, twin.length = self._buffer, self.length
        self._shared = twin._shared = True
        return twin

    def nbytes(self) -> int:
        return self._buffer.nbytes


class DenseStore(KVStore):
    """One growing buffer per sequence for keys and one for values.

    `least_growth` are the rows that a full buffer grows by at least.
    """

    def __init__(self, batch: int, least_growth: int = GROWTH_MINIMUM):
        self._least_growth = least_growth
        self._held: list[tuple[_GrowingRows, _GrowingRows] | None] = [None] * batch

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        held = self._held[sequence]
        if held is None:
            held = _GrowingRows(k_KSD, self._least_growth), _GrowingRows(v_KSD, self._least_growth)
            self._held[sequence] = held
        keys, values = held
        return keys.extend(rows), values.extend(rows)

    def part(self, sequence: int) -> Pair:
        held = self._held[sequence]
        assert held is not None
        return held[0].view(), held[1].view()

    def rows(self, sequence: int) -> int:
        held = self._held[sequence]
        return 0 if held is None else held[0].length

    def crop(self, sequence: int, length: int) -> None:
        for rows in self._held[sequence] or ():
            if length < rows.length:
                rows.truncate(length)

    def trim(self, sequence: int) -> None:
        for rows in self._held[sequence] or ():
            rows.trim()

    def reorder(self, index: list[int]) -> None:
        present, moved = self._held, set[int]()
        self._held = []
        for source in index:
            held = present[source]
            self._held.append((held[0].fork(), held[1].fork()) if held is not None and source in moved else held)
            moved.add(source)

    def fork(self) -> DenseStore:
        twin = DenseStore(0, self._least_growth)
        twin._held = [held and (held[0].fork(), held[1].fork()) for held in self._held]
        return twin

    def nbytes(self) -> int:
        return sum(rows.nbytes() for held in self._held for rows in held or ())
