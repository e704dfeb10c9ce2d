"""Decode attention to heads that keep unequal numbers of tokens, as cases to be timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from megakv.attention.partial import PartialAttention
from megakv.attention.reference import Scoring
from megakv.cache.ragged_attention import RaggedPart
from megakv.cache.ragged_body import BodyIndex, RaggedBody
from megakv.costmodel.curves import RaggedTable
from megakv.costmodel.shape import AttentionShape
from megakv.costmodel.stopwatch import Case, Cases, Pool, rising

HEADS = (1, 8)
TOKENS = (4, 32, 256, 1024, 8192)
LEAST = 3
"""Of `TOKENS`, however long calls may take."""
TWINS, LEAST_BYTES = 64, 32 << 20
"""Bodies that take turns, so that no call finds the tokens of the one before in a cache: so many, or so much memory."""


class RaggedCases:
    """Calls for one shape's heads; those that would take longer than `longest_s` at so many `flops` are left out."""

    def __init__(self, cases: Cases, pool: Pool, shape: AttentionShape, *, flops: float, longest_s: float):
        self._pool, self._group, self._dim = pool, shape.group, shape.head_dim

        def short(tokens: int) -> bool:
            return 4 * shape.group * shape.head_dim * tokens <= longest_s * flops

        self._cases: list[list[Case]] = [
            [
                cases.add(self._call(heads, tokens))
                for place, tokens in enumerate(TOKENS)
                if place < LEAST or short(heads * tokens)
            ]
            for heads in HEADS
        ]

    def _call(self, heads: int, tokens: int) -> Callable[[], object]:
        counts = np.full(heads, tokens)
        index = BodyIndex.of(counts, np.tile(np.arange(tokens), heads))
        width = 2 * self._dim
        twins = max(2, min(TWINS, LEAST_BYTES // (index.tokens * width * self._pool.dtype.itemsize)))
        bodies = [RaggedBody.in_block(index, self._pool.take(index.tokens, width), self._dim) for _ in range(twins)]
        queries, slots = self._pool.take(heads * self._group, 1, self._dim), np.arange(tokens + 1)
        turns = itertools.cycle(RaggedPart(0, body, slots[:-1], slots[:-1]) for body in bodies)
        scoring = Scoring(self._dim**-0.5)
        return lambda: next(turns).add_to(PartialAttention(queries, slots[-1:], scoring))

    def table(self) -> RaggedTable:
        """Once the cases have run."""
        return RaggedTable(
            head_dim=self._dim,
            group=self._group,
            heads=HEADS,
            tokens=TOKENS,
            seconds=tuple(map(rising, self._cases)),
            jitter=self._cases[-1][-1].jitter,
        )
