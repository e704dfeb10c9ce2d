"""Ada-SnapKV: SnapKV's scores compete across the heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megakv.fairkv.budgets import HeadBudgets, shared
from megakv.fairkv.scoring_snapkv import SnapKV


@dataclass
class AdaSnapKV(SnapKV):
    """One pool of tokens for all heads of a layer, which goes to the highest scores (Feng et al. 2024, Algorithm 1).

    Parameters
    ----------
    safeguard : float
        Fraction of the mean budget beside the window that every head keeps of its own best.
    """

    name: ClassVar[str] = "ada_snapkv"
    safeguard: float = 0.2

    def bind(self, layers: int, kv_heads: int) -> None:
        """See `CompressionMethod`."""
        super().bind(layers, kv_heads)
        if not 0 <= self.safeguard <= 1:
            raise ValueError(f"megakv.fairkv.safeguard = {self.safeguard}: allowed: 0 to 1")

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        """A pool above the safeguard."""
        return shared(tokens, kv_heads, self.safeguard, min(self.window, length))
