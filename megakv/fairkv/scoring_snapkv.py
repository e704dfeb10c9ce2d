"""SnapKV: what the last queries of the prompt look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megakv.fairkv.budgets import HeadBudgets, equal
from megakv.fairkv.scoring import Segment, at_least


@dataclass
class SnapKV:
    """Attention from an observation window at the end of the prompt, pooled over neighbours (Li et al. 2024).

    Parameters
    ----------
    window : int
        Last tokens whose queries are observed, and which are always kept.
    pool : int
        Width of the maximum over neighbouring tokens; odd. Clusters are kept together. 1 pools nothing.
    """

    name: ClassVar[str] = "snapkv"
    window: int = 32
    pool: int = 7

    @property
    def observed(self) -> int:
        """The window."""
        return self.window

    @property
    def pool_radius(self) -> int:
        """Neighbours on either side."""
        return self.pool // 2

    @property
    def least(self) -> int:
        """The window."""
        return self.window

    def bind(self, layers: int, kv_heads: int) -> None:
        """See `CompressionMethod`."""
        at_least("window", self.window, 1)
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"megakv.fairkv.pool = {self.pool}: allowed: odd numbers, 1 for no pooling")

    def protected(self, tokens: int) -> int:
        """The window."""
        return self.window

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        """The observed attention."""
        assert mass_KS is not None
        return mass_KS

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        """The same for all heads."""
        return equal(tokens, kv_heads)
