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

    Parameters
    ----------
    sequence : int
        Batch row.
    k_KSD, v_KSD : Tensor
        ``[K, S, D]`` and ``[K, S, Dv]``.
    slots, positions : IntArray
        ``[S]``, slots ascending.
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
    """Keys and values of several sequences in one buffer.

    Parameters
    ----------
    k_KRD, v_KRD : Tensor
        ``[K, R, D]`` and ``[K, R, Dv]`` of all its rows.
    first, count : list of int
        ``[B]`` first row of each sequence, and how many it has there.
    slots : sequence of IntArray
        Of each sequence, ascending; its rows are those of the last ones.
    """

    k_KRD: Tensor
    v_KRD: Tensor
    first: list[int]
    count: list[int]
    slots: Sequence[IntArray]


def dense(parts: Iterable[Part]) -> list[KVPart]:
    """Parts that can be sent to other ranks, which only dense ones are made for."""
    found = []
    for part in parts:
        assert isinstance(part, KVPart), "compressed keys and values do not travel"
        found.append(part)
    return found
