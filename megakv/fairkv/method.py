"""What a compression method is: how it scores a layer's tokens, and how much it lets its heads keep.

A method is a class in one file and one line in `megakv.fairkv.methods`. Its fields are keys of ``megakv.fairkv``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megakv.base.device import upload
from megakv.base.sections import Section
from megakv.distributed.sharding import IntArray
from megakv.fairkv.budgets import HeadBudgets, equal

EVERYTHING = -1
"""Number of observed queries: all of the pass."""


@dataclass(frozen=True)
class Segment:
    """The tokens of one sequence that are compressed together, as one rank sees them.

    Keys are ``[K, n, D]``, values ``[K, n, Dv]``; slots ascend. `orders` has for each context-parallel rank the index
    of its tokens among the segment's on all ranks; `all_slots` are the slots of these.
    """

    sequence: int
    k_KSD: Tensor
    v_KSD: Tensor
    slots: IntArray
    positions: IntArray
    orders: tuple[IntArray, ...]
    rank: int
    all_slots: IntArray

    @property
    def length(self) -> int:
        """Tokens on all ranks."""
        return len(self.all_slots)

    @property
    def order(self) -> Tensor:
        """``[n]`` index of this rank's tokens among all."""
        return upload(self.orders[self.rank], self.k_KSD.device)

    def recent(self, count: int) -> Tensor:
        """``[n]`` which tokens are among the last `count` of the segment."""
        return self.order >= self.length - count


class CompressionMethod(Section, ABC):
    """A way to choose what is kept. Scores are local to a rank's heads; budgets are those of all ranks."""

    name: ClassVar[str]
    uneven: ClassVar[bool] = False
    """Whether the heads of a layer keep different numbers of tokens."""

    @property
    def moved(self) -> int:
        """First tokens that count, where caches are compressed while decoding, as if they stood right before the recent
        ones; 0 for none.
        """
        return 0

    @property
    def observed(self) -> int:
        """Last tokens of a prompt whose queries' attention is measured; 0 for none, `EVERYTHING` for all."""
        return 0

    @property
    def peaks(self) -> bool:
        """Whether the peak of the observed attention counts, over queries and the query heads of a KV head, not its
        mean.

        It leaves out what a query sees of the tokens right before it, as many as are pooled.
        """
        return False

    @property
    def pool_radius(self) -> int:
        """Neighbours on either side whose attention a token may borrow."""
        return 0

    @property
    def pools_mean(self) -> bool:
        """Whether neighbours share the mean of what they were given, not the highest."""
        return False

    @property
    @abstractmethod
    def least(self) -> int:
        """Tokens that every head keeps in any case."""

    def bind(self, layers: int, kv_heads: int) -> None:
        """Refuse settings that do not fit a model, by their names."""

    def protected(self, tokens: int) -> int:
        """Most recent tokens that all heads keep, with `tokens` kept per head on average."""
        return 0

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        """``[K, n]`` scores of a segment's tokens, at least 0, the protected ones aside.

        `mass_KS` is the attention that the observed queries gave to each token, summed or its peak, then pooled; None
        where none are observed.
        """
        assert mass_KS is not None
        return mass_KS

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        """Budgets of a layer's heads, with `tokens` wanted per head on average of a sequence of `length`."""
        return equal(tokens, kv_heads)
