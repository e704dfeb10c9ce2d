"""Which tokens of a KV head that several ranks hold are a rank's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakv.distributed.sharding import IntArray
from megakv.fairkv.layer import LayerMapping
from megakv.fairkv.splitting import split_heads

PERIOD = 32
"""Blocks after which the dealing of tokens begins anew."""
BLOCK = 16
"""Tokens that follow one another on a replica: whole pages of memory, and hardly any imbalance."""
ROW_BLOCK = 64
"""Queries of one pass that follow one another on a replica: attention wants long runs of rows."""

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class HeadShares:
    """How one rank shares its KV heads of a layer with others.

    Heads that this rank alone holds come first, in the order of its tensors.

    Parameters
    ----------
    alone : int
        Number of heads that no other rank holds.
    patterns : tuple of array
        ``[PERIOD]`` bool for each of the other heads: which of as many consecutive blocks are this rank's.
    """

    alone: int
    patterns: tuple[BoolArray, ...]

    @property
    def kv_heads(self) -> int:
        """This rank's KV heads."""
        return self.alone + len(self.patterns)

    def own_tokens(self, index: int, rows: IntArray) -> BoolArray:
        """Which of a sequence's tokens, by their row on this context-parallel rank, shared head `index` keeps here."""
        own: BoolArray = self.patterns[index][rows // BLOCK % PERIOD]
        return own

    def own_queries(self, index: int, slots: IntArray) -> BoolArray:
        """Which of a pass's queries attend to the pass's own tokens here, in shared head `index`."""
        own: BoolArray = self.patterns[index][slots // ROW_BLOCK % PERIOD]
        return own


def dealt(counts: Sequence[int]) -> IntArray:
    """``[sum(counts)]`` the receiver of each thing when everybody gets its count, spread as evenly as can be."""
    total = sum(counts)
    given = np.zeros(len(counts))
    owners = np.empty(total, dtype=np.int64)
    for place in range(total):
        lacking = np.asarray(counts) * (place + 1) / total - given
        owners[place] = int(np.argmax(lacking))
        given[owners[place]] += 1
    return owners


def shares_of_rank(mapping: LayerMapping, rank: int, tp_size: int, shared: Sequence[int], alone: int) -> HeadShares:
    """The shares of one rank in tokens that all heads keep alike: generated ones, and those of uncompressed prompts.

    Parameters
    ----------
    mapping : LayerMapping
        Only its ranks matter: heads are divided so that the slowest rank is fastest.
    rank, tp_size : int
    shared : sequence of int
        Those of the rank's KV heads that other ranks hold too, in the order of its tensors.
    alone : int
        Number of its other heads.
    """
    _, parts = split_heads([PERIOD] * len(mapping.ranks), mapping.ranks, tp_size, whole=True)
    owners = [dealt([int(part) for part in parts[head]]) for head in shared]
    own = (found == mapping.ranks[head].index(rank) for head, found in zip(shared, owners, strict=True))
    return HeadShares(alone, tuple(own))
