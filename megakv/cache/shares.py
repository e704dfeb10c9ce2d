"""What one rank attends to of KV heads that other ranks hold, too: some tokens of every sequence, or some sequences.

What a request keeps of a prompt is divided by `megakv.cache.splitting`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megakv.cache.layer import LayerMapping
from megakv.cache.splitting import split_heads
from megakv.distributed.sharding import IntArray

Copies = Literal["tokens", "batch"]

PERIOD = 32
"""Blocks after which the pattern of tokens begins anew."""
BLOCK = 16
"""Tokens that follow one another on a replica: long runs of memory, and hardly any imbalance."""
ROW_BLOCK = 64
"""Queries of one pass that follow one another on a replica: attention wants long runs of rows."""
PROMPTS = 840
"""Prompts after which the pattern of sequences begins anew: equal shares of up to 8 replicas divide it."""

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class HeadShares(ABC):
    """How one rank shares its KV heads of a layer with others.

    The `alone` heads that this rank alone holds come first, in the order of its tensors. For each of the others a
    pattern says what is this rank's.
    """

    alone: int
    patterns: tuple[BoolArray, ...]

    @property
    def kv_heads(self) -> int:
        """This rank's KV heads."""
        return self.alone + len(self.patterns)

    @property
    def whole_heads(self) -> tuple[float, ...]:
        """As many as would keep as many tokens as those of this rank alone, and as each of the others."""
        return (float(self.alone), *(float(pattern.mean()) for pattern in self.patterns))

    def heads_of(self, prompt: int) -> float:
        """As many whole heads as keep what this rank keeps of a sequence."""
        return sum(self.whole_heads)

    @abstractmethod
    def most_tokens(self, prompt: int, count: int) -> list[int]:
        """Of so many tokens of a sequence that follow one another, those that each shared head keeps here at most."""

    @abstractmethod
    def own_tokens(self, index: int, prompts: int | IntArray, rows: IntArray) -> BoolArray:
        """Which tokens of sequences, by their row on this context-parallel rank, shared head `index` keeps here.

        `prompts` are those that the sequences began as (`TokenTable.prompts`): of each token, or of all.
        """

    @abstractmethod
    def own_queries(self, index: int, prompts: int | IntArray, slots: IntArray) -> BoolArray:
        """Which of a pass's queries attend to the pass's own tokens here, in shared head `index`."""


class TokenShares(HeadShares):
    """Of every sequence some tokens: of as many consecutive blocks those in the pattern ``[PERIOD]``."""

    def most_tokens(self, prompt: int, count: int) -> list[int]:
        periods, rest = divmod(count, PERIOD * BLOCK)
        own = [BLOCK * int(pattern.sum()) for pattern in self.patterns]
        return [each * periods + min(rest, each) for each in own]

    def own_tokens(self, index: int, prompts: int | IntArray, rows: IntArray) -> BoolArray:
        own: BoolArray = self.patterns[index][rows // BLOCK % PERIOD]
        return own

    def own_queries(self, index: int, prompts: int | IntArray, slots: IntArray) -> BoolArray:
        own: BoolArray = self.patterns[index][slots // ROW_BLOCK % PERIOD]
        return own


class BatchShares(HeadShares):
    """Some sequences, with all their tokens, and nothing of the others: FairKV's data parallelism (Section 4).

    Of as many consecutive prompts of a batch those in the pattern ``[PROMPTS]``; copies of a sequence stay with it.
    """

    def most_tokens(self, prompt: int, count: int) -> list[int]:
        return [count * int(pattern[prompt % PROMPTS]) for pattern in self.patterns]

    def heads_of(self, prompt: int) -> float:
        return float(self.own_heads(prompt).sum())

    def own_heads(self, prompt: int) -> BoolArray:
        """``[K]`` which of this rank's KV heads serve a sequence here."""
        shared = [pattern[prompt % PROMPTS] for pattern in self.patterns]
        return np.array([True] * self.alone + shared, dtype=bool)

    def own_tokens(self, index: int, prompts: int | IntArray, rows: IntArray) -> BoolArray:
        return np.broadcast_to(self.patterns[index][np.asarray(prompts) % PROMPTS], rows.shape)

    def own_queries(self, index: int, prompts: int | IntArray, slots: IntArray) -> BoolArray:
        return self.own_tokens(index, prompts, slots)


def interleaved(parts: Sequence[float], places: int) -> IntArray:
    """``[places]`` the receiver of each thing when everybody gets his part of them, spread as evenly as can be."""
    total = sum(parts)
    given = np.zeros(len(parts))
    owners = np.empty(places, dtype=np.int64)
    for place in range(places):
        lacking = np.asarray(parts) * (place + 1) / total - given
        owners[place] = int(np.argmax(lacking))
        given[owners[place]] += 1
    return owners


def owners(mapping: LayerMapping, layer: int) -> list[IntArray]:
    """By KV head, the rank that serves each of ``[PROMPTS]`` prompts, where copies divide the batch by their shares.

    Where a batch cannot be divided so, one head after the other, and one layer after the other, begins with another
    replica: what is left over is not all on one rank.
    """
    found: list[IntArray] = []
    copied = 0
    for ranks, shares in zip(mapping.ranks, mapping.shares, strict=True):
        first = (layer + copied) % len(ranks)
        turned = (*ranks[first:], *ranks[:first])
        found.append(np.array(turned)[_replicas((*shares[first:], *shares[:first]))])
        copied += len(ranks) > 1
    return found


@lru_cache(maxsize=64)
def _replicas(shares: tuple[float, ...]) -> IntArray:
    return interleaved(shares, PROMPTS)


def shares_of_rank(mapping: LayerMapping, rank: int, tp_size: int, *, layer: int, copies: Copies) -> HeadShares:
    """The shares of one rank: in a batch, or in tokens that all heads keep alike, which are generated ones and those of
    uncompressed prompts.
    """
    held = [head for head, ranks in enumerate(mapping.ranks) if rank in ranks]
    shared = [head for head in held if len(mapping.ranks[head]) > 1]
    alone = len(held) - len(shared)
    if copies == "batch":
        of_prompts = owners(mapping, layer)
        return BatchShares(alone, tuple(of_prompts[head] == rank for head in shared))
    _, parts = split_heads([PERIOD] * len(mapping.ranks), mapping.ranks, tp_size, whole=True)
    places = [(parts[head], mapping.ranks[head].index(rank)) for head in shared]
    return TokenShares(alone, tuple(interleaved(part, PERIOD) == place for part, place in places))
