"""Everything that a rank's heads hold of a sequence, each head other tokens: its attention, and its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.attention.partial import Scoring
from megakv.base.device import upload
from megakv.cache.notes import Notes
from megakv.cache.store import KVStore
from megakv.distributed.sharding import IntArray
from megakv.fairkv.attention_weights import SCORE_ELEMENTS, ScoredQueries
from megakv.fairkv.method import Segment
from megakv.fairkv.observation import pooled

OverRanks = Callable[[Tensor], Tensor]
"""The maximum over some ranks, in place."""


@dataclass(frozen=True)
class HeldTokens:
    """Of one sequence in one layer, after a pass.

    Rows ``[K, m]`` of each head's tokens ascend, -1 behind the last; so do slots, positions, and the indices `orders`
    among all tokens that the sequence ever had, at `all_slots`. Keys are ``[K, m, D]``, values ``[K, m, Dv]``.
    """

    sequence: int
    rows: IntArray
    slots: IntArray
    positions: IntArray
    orders: IntArray
    all_slots: IntArray
    k_KMD: Tensor
    v_KMD: Tensor

    @classmethod
    def of(cls, call: AttentionCall, sequence: int, all_slots: IntArray, least: int = 0) -> HeldTokens:
        """What a layer's store holds; room for `least` tokens of each head."""
        found: list[list[tuple[Tensor, Tensor, IntArray]]] = [[] for _ in range(call.kv_heads)]
        for head, keys, values, numbers in cast(KVStore, call.store).pieces(sequence):
            found[head].append((keys, values, numbers))
        counts = [sum(len(numbers) for _, _, numbers in parts) for parts in found]
        rows = np.full((len(found), max(least, *counts)), -1)
        some = next((parts[0][:2] for parts in found if parts), (call.k_KLD[0], call.v_KLD[0]))
        k_KMD, v_KMD = (part.new_zeros((*rows.shape, part.shape[-1])) for part in some)
        for head, (parts, count) in enumerate(zip(found, counts, strict=True)):
            if not parts:
                continue
            numbers = np.concatenate([part[2] for part in parts])
            order = np.argsort(numbers, kind="stable")
            index = upload(order, k_KMD.device)
            rows[head, :count] = numbers[order]
            k_KMD[head, :count] = torch.cat([keys for keys, _, _ in parts])[index]
            v_KMD[head, :count] = torch.cat([values for _, values, _ in parts])[index]
        there, table = rows >= 0, call.table
        slots, positions = (
            np.where(there, np.append(column, -1)[rows], -1)
            for column in (table.slots(call.rank, sequence), table.positions(call.rank, sequence))
        )
        orders = np.where(there, np.searchsorted(all_slots, slots), -1)
        return cls(sequence, rows, slots, positions, orders, all_slots, k_KMD, v_KMD)

    @cached_property
    def there(self) -> Tensor:
        """``[K, m]`` where there is a token."""
        return upload(self.rows >= 0, self.k_KMD.device)

    def from_slot(self, slot: int) -> Tensor:
        """``[K, m]`` where there is one at a slot or beyond."""
        return upload((self.rows >= 0) & (self.slots >= slot), self.k_KMD.device)

    def segment(self) -> Segment:
        """As compression methods take it, slots and order by head."""
        columns = self.slots, self.positions, (self.orders,), 0, self.all_slots
        return Segment(self.sequence, self.k_KMD, self.v_KMD, *columns)

    def noted(self, mass_KM: Tensor, kept: Tensor | None = None) -> Notes:
        """What was given to its tokens, or to those that are kept."""
        heads, places = np.nonzero((self.there if kept is None else kept).cpu().numpy())
        index = upload(heads, mass_KM.device), upload(places, mass_KM.device)
        return Notes(heads=heads, held=self.slots[heads, places], mass=mass_KM[index])

    def add_mass(
        self,
        mass_KM: Tensor,
        queries: Tensor,
        q_slots: IntArray,
        scoring: Scoring,
        *,
        peak: bool = False,
        near: int = 0,
        before: int | None = None,
    ) -> None:
        """Count in what queries ``[L, H, D + 1]`` at slots ``[L]`` give to each token: the sum, or the peak.

        Attention from a query to itself and the `near` tokens before it does not count, nor does that to tokens at slot
        `before` and beyond.
        """
        kv_heads, count = self.rows.shape
        if not count or not len(q_slots):
            return
        columns = self.slots, self.positions, self.orders
        counts = self.rows >= 0 if before is None else (self.rows >= 0) & (self.slots < before)
        q_orders, step = np.searchsorted(self.all_slots, q_slots), max(1, SCORE_ELEMENTS // (queries.shape[1] * count))
        for a in range(0, len(q_slots), step):
            b = a + step
            scored = ScoredQueries(queries[a:b], q_slots[a:b], q_orders[a:b], kv_heads, scoring)
            scored.add_to(mass_KM, self.k_KMD, *columns, peak=peak, near=near, counts=counts)

    def pooled(
        self, mass_KM: Tensor, radius: int, heads: IntArray, all_heads: int, over: OverRanks, *, mean: bool
    ) -> Tensor:
        """The maximum, or mean, over every token's neighbours within a radius that its head still holds, on any rank.

        `heads` ``[K]`` are this rank's of `all_heads` that any rank over which the maximum is taken may hold.
        """
        device, (own, places) = mass_KM.device, np.nonzero(self.rows >= 0)
        present = torch.zeros(len(self.all_slots), dtype=torch.uint8, device=device)
        present[upload(self.orders[own, places], device)] = 1
        everywhere = np.flatnonzero(over(present).cpu().numpy())
        # Tokens that are no neighbours lie one step too far apart, whatever lay between them.
        steps = np.minimum(np.diff(everywhere, prepend=0), radius + 1)
        column = np.cumsum(steps)
        at = column[np.searchsorted(everywhere, self.orders[own, places])]
        spread = mass_KM.new_zeros((all_heads, int(column[-1]) + 1 if len(column) else 1))
        index = upload(heads[own], device), upload(at, device)
        here = upload(own, device), upload(places, device)
        spread[index] = mass_KM[here]
        shared = pooled(over(spread), radius, mean=mean)
        result = torch.zeros_like(mass_KM)
        result[here] = shared[index]
        return result
