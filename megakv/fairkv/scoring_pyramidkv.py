"""PyramidKV: SnapKV with more for the first layers than for the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megakv.fairkv.budgets import HeadBudgets, equal, pyramid
from megakv.fairkv.scoring import at_least
from megakv.fairkv.scoring_snapkv import SnapKV


@dataclass
class PyramidKV(SnapKV):
    """SnapKV's scores under budgets that fall linearly over the layers (Cai et al. 2024, Section 4.2).

    Parameters
    ----------
    decay : float
        The last layer keeps the mean over this, beside its window.
    """

    name: ClassVar[str] = "pyramidkv"
    decay: float = 20.0

    def bind(self, layers: int, kv_heads: int) -> None:
        """See `CompressionMethod`."""
        super().bind(layers, kv_heads)
        at_least("decay", self.decay, 1)

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        """The same for all heads of a layer."""
        own = pyramid(tokens, layer, layers, length=length, least=min(self.window, length), decay=self.decay)
        return equal(own, kv_heads)
