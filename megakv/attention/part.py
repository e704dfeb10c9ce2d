"""Keys and values that one sequence's queries attend to in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megakv.attention.partial import PartialAttention
from megakv.distributed.sharding import IntArray


class Part(Protocol):
    """Some of a sequence's cached keys and values, however they are held."""

    @property
    def sequence(self) -> int:
        """Batch row."""

    def add_to(self, partial: PartialAttention) -> None:
        """Attend to them and merge the result."""


@dataclass(frozen=True)
class KVPart:
    """Keys and values of one sequence on one rank, with the coordinates that causality is decided from.

    ``[K, S, D]`` keys, ``[K, S, Dv]`` values and ``[S]`` slots, which ascend, and positions.
    """

    sequence: int
    k_KSD: Tensor
    v_KSD: Tensor
    slots: IntArray
    positions: IntArray

    def add_to(self, partial: PartialAttention) -> None:
        """See `Part`."""
        partial.add(self.k_KSD, self.v_KSD, self.slots, self.positions)


@dataclass(frozen=True)
class PackedRows:
    """Keys and values of several sequences in one buffer."""

    k_KRD: Tensor
    v_KRD: Tensor
    first: list[int]
    """``[B]`` the first row of each sequence, of which there are `count`."""
    count: list[int]
    slots: Sequence[IntArray]
    """Of each sequence, ascending; its rows are those of the last ones."""


def dense(parts: Iterable[Part]) -> list[KVPart]:
    """Parts that can be sent to other ranks, which only dense ones are made for."""
    found = []
    for part in parts:
        assert isinstance(part, KVPart), "compressed keys and values do not travel"
        found.append(part)
    return found
