"""Heads that are shared with other tensor-parallel ranks, off the accelerator: each has rows of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from megakv.attention.method import AttentionCall, PartElsewhere
from megakv.cache.shared_heads import SharedHeadsStore
from megakv.cache.shares import HeadShares
from megakv.cache.store import Pair
from megakv.distributed.sharding import IntArray, TokenBlock
from megakv.offload.store import Strip, TieredStore
from megakv.offload.tiered_rows import StoreEngine


class SharedTiers(SharedHeadsStore):
    """Rows of the heads of this rank alone in one tier, and those of each shared head in another.

    Only the first keeps activations. What is new in a pass is on the accelerator until the layer has attended, and a
    turn that may be compressed until it ends.
    """

    def __init__(self, layer: int, prompts: IntArray, shares: HeadShares, engine: StoreEngine):
        widths = iter(shares.whole_heads)
        total = sum(shares.whole_heads) or 1.0
        super().__init__(prompts, shares, lambda batch: TieredStore(layer, batch, engine, next(widths) / total))

    @property
    def strips(self) -> list[Strip]:
        """The tiers, that of the heads of this rank alone first."""
        alone, stores = self._shares.alone, cast(list[TieredStore], self._kept)
        shared = enumerate(zip(stores[1:], self._kept_rows, strict=True), start=alone)
        others = [Strip(store, slice(index, index + 1), columns) for index, (store, columns) in shared]
        return [Strip(stores[0], slice(0, alone)), *others]

    @property
    def tier(self) -> TieredStore:
        """That of the heads of this rank alone, which knows of all tokens."""
        return cast(TieredStore, self._kept[0])

    def set_format(self, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Take the format of keys and values of all heads, of which there may be none."""
        for strip in self.strips:
            assert strip.heads is not None
            strip.store.set_format(k_KSD[strip.heads], v_KSD[strip.heads])

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        self._expect(k_KSD, v_KSD)
        super().append(sequence, k_KSD, v_KSD)

    def append_each(self, sequences: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> None:
        self._expect(k_KLD, v_KLD)
        super().append_each(sequences, k_KLD, v_KLD)

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        self._expect(k_KSD, v_KSD)
        return super().reserve(sequence, rows, k_KSD, v_KSD)

    def _expect(self, k_KSD: Tensor, v_KSD: Tensor) -> None:
        self.set_format(k_KSD, v_KSD)
        self.tier.engine.expect(self.tier)

    def _keep(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor, first: int) -> None:
        # Of a shared head there may be no token, but its rows have a width.
        self.set_format(k_KSD, v_KSD)
        super()._keep(sequence, k_KSD, v_KSD, first)

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> PartElsewhere | None:
        return self.tier.engine.attend_on_host(self.strips, call, q_HLD, tokens)
