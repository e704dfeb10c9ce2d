"""Places behind the last rows of a cache in all layers, which passes of a few tokens take without asking a store.

Every layer of a pass stores as many rows. Where each is asked for places, a step of many sequences takes more time in
Python than in products; a cache asks all of them together, and not again before some layer's memory is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from megakv.attention.compiled import RUN_WORDS, RowTables, Run
from megakv.cache.dense import DenseStore
from megakv.cache.segments import SegmentedRows
from megakv.cache.store import KVStore, Pair
from megakv.distributed.sharding import IntArray

TOKENS = Run._fields.index("tokens")


class Places:
    """What the stores of all layers have lent: by sequence, `left` places, of which `used` have been taken."""

    def __init__(self, rows: Sequence[Sequence[tuple[SegmentedRows | None, int]]], gone: IntArray, dtype: torch.dtype):
        runs = [[[] if held is None else held.runs() for held, _ in layer] for layer in rows]
        self._lent = [[held if places else None for held, places in layer] for layer in rows]
        self.dtype, self.gone = dtype, gone
        self.counts = [max(map(len, each)) for each in zip(*runs, strict=True)]
        """Runs of each sequence: in a layer that has fewer, the first ones are empty."""
        self.left = [min(places for _, places in each) for each in zip(*rows, strict=True)]
        self.used = [0] * len(self.left)
        absent = (0,) * RUN_WORDS
        padded = (
            chain([absent] * (count - len(own)), own)
            for layer in runs
            for count, own in zip(self.counts, layer, strict=True)
        )
        flat = list(chain.from_iterable(chain.from_iterable(padded)))
        self.words = np.array(flat, dtype=np.int64).reshape(len(rows), sum(self.counts), RUN_WORDS)
        """``[layers, runs, 9]`` where rows lay when they were lent."""

    @classmethod
    def of(cls, stores: Sequence[KVStore], new: Sequence[int], like: Pair) -> Places | None:
        """Those of all layers' stores for so many new rows of each sequence; None where stores are of another kind."""
        dense = [store for store in stores if type(store) is DenseStore]
        sequences, dtype = range(len(new)), like[0].dtype
        if len(dense) < len(stores) or any(store.dtypes - {dtype} for store in dense):
            return None
        gone = [[store.gone(sequence) for sequence in sequences] for store in dense]
        rows = [[store.lend(sequence, new[sequence], like) for sequence in sequences] for store in dense]
        return cls(rows, np.array(gone, dtype=np.int64), dtype)

    def has(self, new: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether so many are left of each sequence, for rows of that type."""
        return dtype == self.dtype and all(rows <= left for rows, left in zip(new, self.left, strict=True))

    def take(self, new: Sequence[int]) -> None:
        """As many have rows now, in every layer."""
        for sequence, rows in enumerate(new):
            self.left[sequence] -= rows
            self.used[sequence] += rows

    def settle(self) -> None:
        """Tell the stores, and give back what is left."""
        for layer in self._lent:
            for held, rows in zip(layer, self.used, strict=True):
                if held is not None:
                    held.taken(rows)


def tables_of(every: Sequence[Places]) -> RowTables:
    """Where all rows lie in every layer: those of the sequences of several caches, behind one another."""
    words = np.concatenate([each.words for each in every], axis=1)
    counts, used = (
        np.array([*chain.from_iterable(own)]) for own in ([p.counts for p in every], [p.used for p in every])
    )
    there = counts > 0
    words[:, np.cumsum(counts)[there] - 1, TOKENS] += used[there]
    return RowTables.at(words, counts, np.concatenate([each.gone for each in every], axis=1))
