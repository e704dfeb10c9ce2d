"""StreamingLLM: the first tokens and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megakv.fairkv.budgets import HeadBudgets, equal
from megakv.fairkv.scoring import Reduce, Segment, at_least


@dataclass
class StreamingLLM:
    """Attention sinks and a recent window (Xiao et al. 2024, Section 3.2).

    Parameters
    ----------
    sinks : int
        First tokens that are kept.
    """

    name: ClassVar[str] = "streaming_llm"
    observed: ClassVar[int] = 0
    reduce: ClassVar[Reduce] = "mean"
    pool_radius: ClassVar[int] = 0
    sinks: int = 4

    @property
    def least(self) -> int:
        """The sinks and one recent token."""
        return self.sinks + 1

    def bind(self, layers: int, kv_heads: int) -> None:
        """See `CompressionMethod`."""
        at_least("sinks", self.sinks, 0)

    def protected(self, tokens: int) -> int:
        """None beside the scores, which are the order already."""
        return 0

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        """Later is better, but the sinks are best."""
        score = segment.order.float()
        score[segment.order < self.sinks] = torch.inf
        return score.expand(segment.k_KSD.shape[0], -1)

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        """The same for all heads."""
        return equal(tokens, kv_heads)
