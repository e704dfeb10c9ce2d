"""SnapKV: what the last queries of the prompt look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from megakv.fairkv.budgets import HeadBudgets, equal
from megakv.fairkv.scoring import EVERYTHING, Reduce, Segment, at_least


@dataclass
class SnapKV:
    """Attention from an observation window at the end of the prompt, pooled over neighbours (Li et al. 2024).

    The window tells what matters where it holds the question. Where the question comes after compression, what the
    whole prompt ever looked at sharply tells more: ``observe = "prompt"`` with ``reduce = "peak"``.

    Parameters
    ----------
    window : int
        Last tokens whose queries are observed, and which are always kept.
    observe : {"window", "prompt"}
        Whose queries are observed: those of the window, or all, which costs as much as the prompt's own attention.
    reduce : {"mean", "peak"}
        What counts of their attention.
    pool : int
        Width of the maximum over neighbouring tokens; odd. Clusters are kept together. 1 pools nothing.
    """

    name: ClassVar[str] = "snapkv"
    window: int = 32
    observe: Literal["window", "prompt"] = "window"
    reduce: Reduce = "mean"
    pool: int = 7

    @property
    def observed(self) -> int:
        """The window, or everything."""
        return self.window if self.observe == "window" else EVERYTHING

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
