"""Logits that are asked for of a pass, and the rows of the last layer that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megakv.distributed.sharding import IntArray, TokenBlock


@dataclass(frozen=True)
class Wanted:
    """Logits asked for: which tokens, and where they go in the output."""

    sequence: IntArray
    slot: IntArray
    column: IntArray
    columns: int
    picked: IntArray | None
    """Which of the columns are given back, in which order; None for each once."""

    @classmethod
    def of(cls, keep: Any, new: NDArray[np.bool_], pasts: IntArray) -> Wanted:
        """What ``logits_to_keep`` asks for of new slots ``[B, T]`` behind ``[B]``, of which some are padding.

        Raises
        ------
        ValueError
            If columns are asked for that there are not.
        """
        if new.shape[1] == 1 and not isinstance(keep, Tensor) and new.all():
            # As in decoding: many calls for little.
            return cls(np.arange(len(new)), pasts, np.zeros(len(new), dtype=np.int64), 1, None)
        every = np.arange(new.shape[1])
        picked: IntArray | None = None
        if isinstance(keep, Tensor):
            if keep.dim() != 1:
                raise ValueError(
                    f"logits_to_keep has shape {list(keep.shape)}; MegaKV takes a number, or a tensor of one dimension"
                )
            try:
                columns, picked = np.unique(every[keep.detach().cpu().numpy()], return_inverse=True)
            except IndexError as error:
                raise ValueError(f"logits_to_keep = {keep.tolist()} does not fit {len(every)} new tokens") from error
        else:
            columns = every[-keep:]
        if len(columns) == 1 and columns[0] == len(every) - 1:
            # The last real token of each row: what follows it is asked for, also where padding is on the right.
            last = len(every) - 1 - np.argmax(new[:, ::-1], axis=1)
            rows = np.flatnonzero(new.any(axis=1))
            return cls(rows, last[rows] + pasts[rows], np.zeros(len(rows), dtype=np.int64), 1, picked)
        rows, index = np.nonzero(new[:, columns])
        return cls(rows, columns[index] + pasts[rows], index, len(columns), picked)

    def tokens(self, batch: int) -> TokenBlock:
        """Their tokens, of which nobody asks for the position."""
        return TokenBlock(self.sequence, self.slot, self.slot, batch)

    def among(self, tokens: TokenBlock) -> tuple[IntArray, IntArray]:
        """Which of them are among a rank's tokens, and where in its packed row."""
        if not len(tokens) or not len(self.slot):
            return (np.zeros(0, dtype=np.int64),) * 2
        if len(tokens) == len(self.slot) and (tokens.slot == self.slot).all():
            # As in decoding. Rows of both go up by sequence, then by slot.
            if (tokens.sequence == self.sequence).all():
                return (np.arange(len(tokens)),) * 2
        width = 1 + max(int(slots.max()) for slots in (self.slot, tokens.slot))
        wanted, there = (block.sequence * width + block.slot for block in (self, tokens))
        rows = np.searchsorted(there, wanted)
        found = np.flatnonzero(there[np.minimum(rows, len(there) - 1)] == wanted)
        return found, rows[found]


class LastRows(NamedTuple):
    """Of so many packed rows of a pass, those whose results the output head reads."""

    rows: Tensor
    length: int
    queries: bool
    """Whether the last attention computes no other queries."""
