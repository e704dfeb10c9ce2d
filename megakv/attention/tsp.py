"""TSP: tensor and sequence parallelism as KV-Runahead compares itself with it (its Sections 2 and 4.1, Figure 4).

Shards are contiguous and even, an all-gather brings all keys and values to every rank, and each rank computes its
whole rectangle of scores, queries by prompt, under a mask: nothing is skipped because it is hidden. That is the paper's
form, where scores are one dense product. `AllGatherKV` on the same layout is TSP with causal skipping.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from megakv.attention.all_gather import AllGatherKV
from megakv.attention.partial import PartialAttention
from megakv.attention.visibility import SHORT_STEP, Block, Slots

MASKED_TILE = 512
"""Rows at a time where masks are needed: the fewer rows, the fewer pairs under a mask. A rectangle of 2,048 by 8,192
tokens then takes 3% more than without any mask, and a square under a single one 25% more."""


class Stretch(NamedTuple):
    """Consecutive keys ``[k0, k1)``: seen by every row, by none, or by some."""

    k0: int
    k1: int
    kind: Literal["full", "hidden", "masked"]


def stretches(q_slots: Slots, k_slots: Slots, window: int | None) -> list[Stretch]:
    """Cut all keys by who sees them. Short stretches beside a masked one join it: fewer kernel calls cost less.

    There is at least one query and one key; a query sees `window` slots, itself included, or all earlier ones.
    """
    first, last = q_slots[0], q_slots[-1]
    # Keys that some row sees are [some0, some1), those that every row sees [every0, every1).
    some0, every0 = 0, 0
    every1, some1 = (int(end) for end in np.searchsorted(k_slots, [first, last], side="right"))
    if window is not None:
        some0, every0 = (int(end) for end in np.searchsorted(k_slots, [first - window, last - window], side="right"))
    some0 = min(some0, some1)
    if every0 >= every1:
        every0 = every1 = some1
    kinds: tuple[Literal["full", "hidden", "masked"], ...] = ("hidden", "masked", "full", "masked", "hidden")
    ends = pairwise((0, some0, every0, every1, some1, len(k_slots)))
    found = [Stretch(k0, k1, kind) for (k0, k1), kind in zip(ends, kinds, strict=True) if k0 < k1]
    if any(stretch.kind == "masked" for stretch in found):
        found = [each if each.k1 - each.k0 >= SHORT_STEP else each._replace(kind="masked") for each in found]
    groups = [list(group) for _, group in groupby(found, lambda stretch: stretch.kind)]
    return [group[0]._replace(k1=group[-1].k1) for group in groups]


class RectangleAttention(PartialAttention):
    """Partial attention that computes every pair of queries and keys, visible or not.

    The kernel is that of all other methods, in its fastest form: where a mask would be the same for all pairs of a
    stretch it is left out, and the result of a stretch that no row sees is dropped, which is what weights of zero do to
    it. Only keys that some rows see and others do not are computed under an explicit mask. So the rectangle costs its
    pairs and no more, and what another method gains over it is owed to pairs, messages and waiting alone.
    """

    def _add_rows(self, k_KSD: Tensor, v_KSD: Tensor, k_slots: Slots, k_positions: Slots) -> None:
        rows = len(self.q_slots)
        if not rows or not len(k_slots):
            return
        part = k_KSD, v_KSD, k_slots, k_positions
        window = self.scoring.window
        masked = any(stretch.kind == "masked" for stretch in stretches(self.q_slots, k_slots, window))
        tile = MASKED_TILE if masked else rows
        for q0 in range(0, rows, tile):
            q1 = min(q0 + tile, rows)
            for k0, k1, kind in stretches(self.q_slots[q0:q1], k_slots, window):
                if kind == "hidden":
                    self._attend_block(Block(q0, q1, k0, k1, "full"), *part)
                else:
                    self._add_block(Block(q0, q1, k0, k1, kind), *part)


class TSP(AllGatherKV):
    """Every rank receives all keys and values, then computes its queries against all of them."""

    partial_type = RectangleAttention
