"""Rows that stay on the accelerator: a copy of the last rows of each sequence, within a budget of their own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

from torch import Tensor

FORGET_DIVISOR = 32
"""Rows that a window has left behind go when they are more than this fraction of those that stay."""


class ResidentBudget:
    """Accelerator memory for rows that stay there; an engine's attention layers share it evenly.

    `used` are the bytes in use in each.
    """

    def __init__(self, nbytes: int, layers: int):
        self._share = nbytes // layers
        self.used = [0] * layers

    def tokens(self, layer: int, row_bytes: int, batch: int, *, part: float = 1.0, shared: bool = False) -> int:
        """Tokens that one of a batch's sequences may keep in a part of a layer; with `shared`, a copy keeps some of
        them.
        """
        fair = int(part * self._share) // batch
        if fair > self._share - self.used[layer] and not shared:
            # Caches that nobody holds any more may still wait for the garbage collector.
            gc.collect()
        return max(0, min(fair, self._share - self.used[layer]) // row_bytes)


class ResidentRows:
    """Rows of one layer and sequence from a token on, a copy ``[n, W]`` of their own.

    They also lie in a tier, so they can be given up any time.
    """

    def __init__(self, budget: ResidentBudget, layer: int, first: int, rows: Tensor):
        self.first, self.rows = first, rows
        self._budget, self._layer = budget, layer
        budget.used[layer] += rows.nbytes

    def __del__(self) -> None:
        self._budget.used[self._layer] -= self.rows.nbytes

    @property
    def end(self) -> int:
        """Index behind the last one."""
        return self.first + len(self.rows)


class LayerResidents:
    """The rows of one layer that stay, by sequence.

    Where more of a prompt, a later turn, or many tokens one by one have come, the last rows stay from then on, in
    a `part` of the layer's memory.
    """

    def __init__(self, budget: ResidentBudget, layer: int, rows: Sequence[ResidentRows | None], part: float = 1.0):
        self.rows = list(rows)
        self._budget, self._layer, self._part = budget, layer, part
        self._grown: set[int] = set()
        # Tokens that a sequence had when its rows were moved, or could not be.
        self._moved: dict[int, int] = {}

    def append_each(self, sequences: Sequence[int], firsts: Sequence[int], rows: Tensor) -> None:
        """Rows ``[n, W]`` of some sequences come, equal parts, behind so many of each."""
        each = rows.shape[0] // len(sequences)
        for index, (sequence, first) in enumerate(zip(sequences, firsts, strict=True)):
            held = self.rows[sequence]
            if first == 0:
                self.rows[sequence] = self._last_of(rows[each * index : each * (index + 1)], 0)
            elif each > 1 or (
                held is not None and first + 1 - max(held.end, self._moved.get(sequence, 0)) > len(held.rows)
            ):
                self._grown.add(sequence)

    def counts(self) -> list[int]:
        """Tokens of every sequence that stay."""
        return [0 if held is None else len(held.rows) for held in self.rows]

    def before(self, counts: Sequence[int]) -> list[int]:
        """Of so many leading tokens of each sequence, those before the ones that stay."""
        return [min(count, held.first) if held else count for count, held in zip(counts, self.rows, strict=True)]

    def take_grown(self, group: range) -> list[int]:
        """Sequences of a group whose rows are to be moved now, with `move`."""
        grown = sorted(self._grown.intersection(group))
        self._grown.difference_update(grown)
        return grown

    def move(self, sequence: int, first: int, rows: Tensor) -> None:
        """Replace what is held of a sequence by its last rows, of which ``[n, W]`` are given from `first` on.

        Where a copy of the sequence shares what is held, and the budget has less left than that, it stays.
        """
        self._moved[sequence] = first + len(rows)
        before, self.rows[sequence] = self.rows[sequence], None
        shared = None if before is None else weakref.ref(before)
        # Its memory is free now, unless others hold it.
        del before
        present = None if shared is None else shared()
        after = self._last_of(rows, first, shared=present is not None)
        kept = 0 if after is None else len(after.rows)
        self.rows[sequence] = present if present is not None and kept < len(present.rows) else after

    def _last_of(self, rows: Tensor, first: int, *, shared: bool = False) -> ResidentRows | None:
        """A sequence's share of its rows from `first` on: the first ones are left to the host and to recomputation."""
        row_bytes, batch = rows.shape[1] * rows.element_size(), len(self.rows)
        # Of no head none are kept.
        if not row_bytes:
            return None
        most = self._budget.tokens(self._layer, row_bytes, batch, part=self._part, shared=shared)
        count = min(len(rows), most)
        if not count:
            return None
        first += len(rows) - count
        return ResidentRows(self._budget, self._layer, first, rows[len(rows) - count :].clone())

    def forget(self, sequence: int, rows: int) -> None:
        """The first rows of a sequence are not needed any more."""
        held = self.rows[sequence]
        gone = 0 if held is None else rows - held.first
        if held is not None and FORGET_DIVISOR * gone > len(held.rows):
            self.rows[sequence] = None
            if rows < held.end:
                self.rows[sequence] = ResidentRows(self._budget, self._layer, rows, held.rows[gone:].clone())

    def crop(self, sequence: int, length: int) -> None:
        held = self.rows[sequence]
        if held is not None and length < held.end:
            kept = held.rows[: max(0, length - held.first)].clone()
            self.rows[sequence] = ResidentRows(self._budget, self._layer, held.first, kept) if len(kept) else None
        self._grown.discard(sequence)
        self._moved.pop(sequence, None)

    def reorder(self, index: Sequence[int]) -> None:
        self.rows = [self.rows[source] for source in index]
        self._moved.clear()

    def fork(self) -> LayerResidents:
        return LayerResidents(self._budget, self._layer, self.rows, self._part)
