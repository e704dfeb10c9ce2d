"""A prompt that is spread over ranks, in the compiled call of all layers: keys and values of a layer go to all ranks.

For prompts of few tokens a ring takes longer than what it hides: each message waits for Python, and for threads of the
library that sends it. Messages are those of `megakv.attention.all_gather`, which a layer by itself uses: ranks need not
compute alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megakv.attention.step import HasTable, TokenStep, load_step, seen_rows
from megakv.distributed.sharding import IntArray, Layout, TokenBlock


class SpreadRows:
    """Where all rows that a pass attends to are in the messages of ranks, and which of them a rank's tokens see.

    `held` are the tokens of every rank's message, `tokens` those of this one's queries; `given` ``[B]`` counts the rows
    that it was ever given of each sequence.
    """

    def __init__(self, tokens: TokenBlock, held: Sequence[TokenBlock], own: int, given: IntArray, window: int | None):
        every, order = TokenBlock.joined(held)
        counts = np.stack([np.diff(block.bounds) for block in held]).astype(np.int64)
        self.rows = int(counts.sum(1).max())
        """Those of the longest message: others are sent as long."""
        rank = np.repeat(np.arange(len(held)), counts.sum(1))[order]
        row = np.concatenate([np.arange(len(block)) - block.bounds[block.sequence] for block in held])[order]
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = (np.diff(rank) != 0) | (np.diff(row) != 1) | (np.diff(every.sequence) != 0)
        first = np.flatnonzero(begins)
        pieces = np.stack([rank[first], row[first], np.diff([*first, len(order)])], axis=1).astype(np.int64)
        bounds = np.searchsorted(every.sequence[first], np.arange(every.batch + 1)).astype(np.int64)
        width = 1 + int(every.slot.max(initial=0))
        keys, starts = every.keys(width), every.bounds[tokens.sequence]
        high = np.searchsorted(keys, tokens.keys(width), side="right") - starts
        low = np.zeros_like(high)
        if window is not None:
            before = tokens.sequence * width + np.maximum(tokens.slot - window, -1)
            low = np.searchsorted(keys, before, side="right") - starts
        before = np.ascontiguousarray(given - counts[own], dtype=np.int64)
        self._held = counts, before, pieces, bounds, low, high
        at = [each.ctypes.data for each in self._held]
        self._words = np.array(
            [every.batch, at[0], counts.size, at[1], at[2], len(pieces), *at[3:], len(tokens)], dtype=np.int64
        )
        self.address = self._words.ctypes.data
        """Those of what the compiled call names so."""


def spread_step(layout: Layout, cache: HasTable, comm: Any, *, pairs: bool) -> TokenStep | None:
    """That of a pass of which every rank computes and keeps some tokens; None where it has none, or no kernel."""
    rank, kind = comm.mesh.cp_rank, comm.mesh.device.type
    tokens, (kernel, _) = layout.tokens[rank], load_step()
    if kernel is None or kind != "cpu" or torch.is_autocast_enabled(kind) or not len(tokens):
        return None

    def seen(window: int) -> IntArray:
        return seen_rows(tokens, cache.table, rank, window)

    def spread(window: int | None) -> SpreadRows:
        table = cache.table
        held = table.tokens() if window is None else table.tokens_since(layout.first_slots - window + 1)
        return SpreadRows(tokens, held, rank, table.counts()[rank], window)

    bounds, compute = tokens.bounds.tolist(), comm.ledger.compute
    return TokenStep(kernel, bounds, range(len(tokens)), seen, None, compute, pairs=pairs, spread=spread)
