"""Where one layer's KV heads live, and which share of each its ranks attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerMapping:
    """The replicas of every KV head of a layer.

    Parameters
    ----------
    ranks : tuple
        ``ranks[head]``: the ranks that hold the head, ascending; more than one where it is copied.
    shares : tuple
        ``shares[head]``: what part of the head's kept tokens each of those ranks attends to; they sum to 1.
    """

    ranks: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, parts: Sequence[dict[int, float]]) -> LayerMapping:
        """From a dictionary per head, rank to share."""
        ranks = tuple(tuple(sorted(part)) for part in parts)
        return cls(ranks, tuple(tuple(part[r] for r in held) for part, held in zip(parts, ranks, strict=True)))

    @classmethod
    def even(cls, ranks: Sequence[Sequence[int]]) -> LayerMapping:
        """Every replica of a head with an equal share."""
        held = tuple(tuple(sorted(part)) for part in ranks)
        return cls(held, tuple((1.0 / len(part),) * len(part) for part in held))

    @property
    def copies(self) -> int:
        """Replicas beyond one per head."""
        return sum(len(held) - 1 for held in self.ranks)

    @property
    def copied_heads(self) -> int:
        """Heads with more than one replica: CH."""
        return sum(len(held) > 1 for held in self.ranks)

    @property
    def most_replicas(self) -> int:
        """Of one head: what R_max limits."""
        return max(len(held) for held in self.ranks)

    def loads(self, budgets: Sequence[float], tp_size: int) -> list[float]:
        """Kept tokens that each rank attends to, summed over its heads: the inner sum of the paper's Equation 4."""
        loads = [0.0] * tp_size
        for budget, held, shares in zip(budgets, self.ranks, self.shares, strict=True):
            for rank, share in zip(held, shares, strict=True):
                loads[rank] += budget * share
        return loads

    def renumbered(self, order: Sequence[int]) -> LayerMapping:
        """The same with the contents of rank r on rank ``order[r]``."""
        return LayerMapping.of(
            [
                {order[rank]: share for rank, share in zip(held, shares, strict=True)}
                for held, shares in zip(self.ranks, self.shares, strict=True)
            ]
        )

    def with_shares(self, parts: Sequence[Sequence[float]]) -> LayerMapping:
        """The same placement with the heads divided otherwise; ``parts[head]`` goes along with ``ranks[head]``."""
        shares = []
        for part, held in zip(parts, self.ranks, strict=True):
            total = sum(part)
            shares.append(tuple(value / total for value in part) if total > 0 else (1.0 / len(held),) * len(held))
        return LayerMapping(self.ranks, tuple(shares))


def contiguous_layer(heads: int, tp_size: int) -> LayerMapping:
    """Runs of neighbouring heads, as equal as they can be: the paper's static head allocation (SHA).

    With more ranks than heads every head is copied to a run of ranks, which divide its tokens equally; plain tensor
    parallelism divides the query heads there instead, and each of its ranks reads all of the head's tokens.
    """
    if heads >= tp_size:
        bounds = [rank * heads // tp_size for rank in range(tp_size + 1)]
        return LayerMapping.even([[r] for r in range(tp_size) for _ in range(bounds[r], bounds[r + 1])])
    bounds = [head * tp_size // heads for head in range(heads + 1)]
    return LayerMapping.even([range(bounds[head], bounds[head + 1]) for head in range(heads)])
