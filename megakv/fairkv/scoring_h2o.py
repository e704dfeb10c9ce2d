"""H2O: heavy hitters over the whole prompt, and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megakv.fairkv.budgets import HeadBudgets, equal
from megakv.fairkv.scoring import EVERYTHING, Reduce, Segment


@dataclass
class H2O:
    """Attention accumulated over all queries of the prompt (Zhang et al. 2023, Algorithm 1).

    Half of what is kept are heavy hitters, half the most recent tokens. Every query against every key is computed a
    second time, so this costs as much as the prompt's own attention.

    Parameters
    ----------
    recent : float
        Fraction of what is kept that goes to the most recent tokens.
    """

    name: ClassVar[str] = "h2o"
    observed: ClassVar[int] = EVERYTHING
    reduce: ClassVar[Reduce] = "mean"
    pool_radius: ClassVar[int] = 0
    least: ClassVar[int] = 2
    recent: float = 0.5

    def bind(self, layers: int, kv_heads: int) -> None:
        """See `CompressionMethod`."""
        if not 0 <= self.recent <= 1:
            raise ValueError(f"megakv.fairkv.recent = {self.recent}: allowed: 0 to 1")

    def protected(self, tokens: int) -> int:
        """The recent share."""
        return int(self.recent * tokens)

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        """The accumulated attention."""
        assert mass_KS is not None
        return mass_KS

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        """The same for all heads."""
        return equal(tokens, kv_heads)
