"""The protocol of compression methods: how they score a layer's tokens and how much they let its heads keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from megakv.device import upload
from megakv.distributed.sharding import IntArray
from megakv.fairkv.budgets import HeadBudgets

EVERYTHING = -1
"""Number of observed queries: all of the pass."""
Reduce = Literal["mean", "peak"]


@dataclass(frozen=True)
class Segment:
    """The tokens of one sequence that are compressed together, as one rank sees them.

    Parameters
    ----------
    sequence : int
        Batch row.
    k_KSD, v_KSD : Tensor
        ``[K, n, D]`` and ``[K, n, Dv]`` this rank's keys and values.
    slots, positions : IntArray
        ``[n]``, slots ascending.
    orders : tuple of IntArray
        Per context-parallel rank, the index of each of its tokens among the segment's tokens on all ranks.
    rank : int
        This rank's index.
    all_slots : IntArray
        Slots of the segment's tokens on all ranks, ascending.
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


class CompressionMethod(Protocol):
    """A way to choose what is kept. Scores are local to a rank's heads; budgets are those of all ranks.

    Attributes
    ----------
    name : str
        As in ``megakv.fairkv.method``.
    observed : int
        Last tokens of a prompt whose queries' attention is measured; 0 for none, `EVERYTHING` for all.
    reduce : str
        Over the observed queries and the query heads of a KV head: ``mean`` of their attention, or the ``peak`` of it,
        which leaves out what a query sees of the tokens right before it, as many as are pooled.
    pool_radius : int
        Neighbours on either side whose attention a token may borrow.
    least : int
        Tokens that every head keeps in any case.
    """

    name: ClassVar[str]

    @property
    def observed(self) -> int: ...

    @property
    def reduce(self) -> Reduce: ...

    @property
    def pool_radius(self) -> int: ...

    @property
    def least(self) -> int: ...

    def bind(self, layers: int, kv_heads: int) -> None:
        """Check the method's settings against a model.

        Raises
        ------
        ValueError
            If a setting does not fit, by its name.
        """

    def protected(self, tokens: int) -> int:
        """Most recent tokens that all heads keep, with `tokens` kept per head on average."""

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        """``[K, n]`` scores of a segment's tokens, at least 0, the protected ones aside.

        Parameters
        ----------
        segment : Segment
        mass_KS : Tensor, optional
            ``[K, n]`` attention that the observed queries gave to each token: their sum, or their peak, over the
            queries and the query heads of each KV head, then pooled; None where none are observed.
        """

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        """Budgets of a layer's heads.

        Parameters
        ----------
        layer, layers, kv_heads : int
            Of the whole model.
        tokens : int
            Mean tokens per head that the user asked for.
        length : int
            Tokens of the sequence.
        """


def at_least(setting: str, value: float, bound: float) -> None:
    """Refuse a setting below a bound.

    Raises
    ------
    ValueError
    """
    if value < bound:
        raise ValueError(f"megakv.fairkv.{setting} = {value}: allowed: {bound:g} or more")
