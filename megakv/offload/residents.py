"""Rows that stay on the accelerator: a copy of the last rows of each sequence, within a budget of their own."""

from __future__ import annotations

import gc
import weakref

from torch import Tensor


class ResidentBudget:
    """Accelerator memory for rows that stay there.

    Parameters
    ----------
    nbytes : int
    layers : int
        Attention layers, which share it evenly.
    """

    def __init__(self, nbytes: int, layers: int):
        self._share = nbytes // layers
        self._used = [0] * layers

    @property
    def used(self) -> int:
        """Bytes in use."""
        return sum(self._used)

    def tokens(self, layer: int, row_bytes: int, batch: int, *, shared: bool = False) -> int:
        """Tokens that one of a batch's sequences may keep in a layer; with `shared`, a copy keeps some of them."""
        fair = self._share // batch
        if fair > self._share - self._used[layer] and not shared:
            # Caches that nobody holds any more may still wait for the garbage collector.
            gc.collect()
        return max(0, min(fair, self._share - self._used[layer]) // row_bytes)

    def take(self, layer: int, nbytes: int) -> None:
        """Count bytes of a layer; fewer than none where they are given back."""
        self._used[layer] += nbytes


class ResidentRows:
    """Rows of one layer and sequence on the accelerator; they also lie in a tier, so they can be given up any time.

    Parameters
    ----------
    budget : ResidentBudget
    layer : int
    first : int
        Index of the first one.
    rows : Tensor
        ``[n, W]``, a copy of their own.
    """

    def __init__(self, budget: ResidentBudget, layer: int, first: int, rows: Tensor):
        self.first, self.rows = first, rows
        self._budget, self._layer = budget, layer
        self._nbytes = rows.numel() * rows.element_size()
        budget.take(layer, self._nbytes)

    def __del__(self) -> None:
        self._budget.take(self._layer, -self._nbytes)

    @property
    def end(self) -> int:
        """Index behind the last one."""
        return self.first + len(self.rows)

    @classmethod
    def of_prompt(
        cls, budget: ResidentBudget, layer: int, rows: Tensor, batch: int, *, first: int = 0, shared: bool = False
    ) -> ResidentRows | None:
        """The last rows ``[n, W]`` of a sequence, as many as are its share; None where nothing fits.

        The first ones are left to the host and to recomputation. `first` is the index of the first row given;
        `shared` as for `ResidentBudget.tokens`.
        """
        count = min(len(rows), budget.tokens(layer, rows.shape[1] * rows.element_size(), batch, shared=shared))
        return cls(budget, layer, first + len(rows) - count, rows[len(rows) - count :].clone()) if count else None

    @classmethod
    def moved(
        cls,
        held: list[ResidentRows | None],
        sequence: int,
        budget: ResidentBudget,
        layer: int,
        rows: Tensor,
        first: int,
    ) -> None:
        """Replace what is held of a sequence by its last rows, of which ``[n, W]`` are given from `first` on.

        Where a copy of the sequence shares what is held, and the budget has less left than that, it stays.
        """
        before, held[sequence] = held[sequence], None
        shared = None if before is None else weakref.ref(before)
        # Its memory is free now, unless others hold it.
        del before
        present = None if shared is None else shared()
        after = cls.of_prompt(budget, layer, rows, len(held), first=first, shared=present is not None)
        kept = 0 if after is None else len(after.rows)
        held[sequence] = present if present is not None and kept < len(present.rows) else after

    def cut(self, length: int) -> ResidentRows | None:
        """What is left where a sequence is cut back to a length."""
        if length >= self.end:
            return self
        if length <= self.first:
            return None
        return ResidentRows(self._budget, self._layer, self.first, self.rows[: length - self.first].clone())
