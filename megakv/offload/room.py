"""What a generation will need of the tiers, before its first layer's rows go there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

import numpy as np

from megakv.cache.shares import HeadShares
from megakv.cache.window import held_rows
from megakv.costmodel.stored_rows import page_bytes
from megakv.distributed.sharding import Layout
from megakv.forward.runtime import Runtime
from megakv.offload.cache import OffloadedCache
from megakv.offload.pages import PagePool
from megakv.offload.store import TieredStore


def check_room(
    pool: PagePool,
    cache: OffloadedCache,
    layout: Layout,
    store: TieredStore,
    windows: Sequence[int | None],
    runtime: Runtime,
    *,
    prompt: int,
    new_tokens: int,
) -> None:
    """Refuse a generation, with a MegaKVError, if not all that will be held has room.

    A first pass over its prompt, which may come in pieces, is under way: its tokens are in the table, the rows of none
    are in a store yet. `store` is the layer's that comes first; the others hold as many, but for their windows, and
    their heads where a mapping places them. Budgets are the same on all ranks, tokens and heads are not quite: every
    rank looks at the one with most, so that none is refused while others wait for it. What is still to come is spread
    over the ranks, and what a turn that may be compressed keeps, too: which rank and head keep how much is known when
    it ends. Until then its tokens are on the accelerator. Where heads hold no more than so many tokens while decoding,
    what is evicted makes room for what comes.
    """
    table, ranks = cache.table, 1 if runtime.planner.gathers else cache.size
    shape, step, compressor = runtime.planner.shape, runtime.current, runtime.compressor
    if shape is not None and len(shape.layers) == len(windows):
        # Known before any layer has shown its own.
        windows = [layer.window for layer in shape.layers]
    turn = None
    if compressor is not None and step is not None and step.cache is cache:
        turn = step.compression.turn
        new_tokens = new_tokens if compressor.most is None else min(new_tokens, compressor.most)
    ends = [table.slots(rank, row)[-1:].max(initial=-1) for rank in range(table.size) for row in range(table.batch)]
    pieces = max(0, prompt - 1 - int(max(ends)))
    to_come = -(-(new_tokens + pieces) // ranks)
    turns = [] if turn is None else [length + pieces for length in table.since(turn.first).tolist()]
    kept: list[int | None] = [None] * table.batch
    if turn is not None and compressor is not None:
        kept = [*map(compressor.kept, turns)]
    dense, prompts = cache.uncompressed(), table.prompts.tolist()
    found: list[tuple[int, int]] = []
    for rank in range(table.size):
        # Further pieces are as long as this one.
        longest = int(np.diff(layout.stored[rank].bounds).max()) if pieces else 1
        # A turn comes whole.
        longest = max([longest, *(length for length, count in zip(turns, kept, strict=False) if count is None)])
        slots = [dense.slots(rank, row) for row in range(table.batch)]
        more = [to_come] * table.batch
        for row, count in enumerate(kept):
            if turn is not None and count is not None:
                slots[row], more[row] = slots[row][: np.searchsorted(slots[row], turn.first)], -(-new_tokens // ranks)
        for heads in cache.heads:
            needed = layer = 0
            for (window, gone, own), layers in Counter(zip(windows, cache.gone, heads, strict=True)).items():
                held = [len(each) - int(np.searchsorted(each, gone)) for each in slots]
                rows = [count + coming for count, coming in zip(held, more, strict=True)]
                if window is not None:
                    # Of a first pass one layer at a time holds all rows, of others every layer.
                    slack = pool.page_bytes // (store.row_bytes if own is None else store.body_row_bytes)
                    stay = [held_rows(window, count) + longest + slack for count in rows]
                    stay = [max(each) for each in zip(stay, held, strict=True)] if cache.length or turns else stay
                    rows = [min(each) for each in zip(stay, rows, strict=True)]
                    layer = max(layer, store.bytes_for(held, own, prompts) - store.bytes_for(rows, own, prompts))
                each = zip(prompts, kept, strict=True)
                bodies = (_body_bytes(store, own, at, n / ranks, pool.page_bytes) for at, n in each if n)
                needed += layers * (store.bytes_for(rows, own, prompts) + sum(bodies))
            found.append((needed + layer, rank))
    needed, rank = max(found)
    lengths = table.counts()[rank].tolist()
    tokens = f"{sum(lengths)} tokens so far, up to {to_come} more for each of {len(lengths)} sequences"
    if any(kept) or cache.holds_compressed:
        tokens += ", of which megakv.fairkv.budget keeps a part"
    rows_bytes, held_bodies = cache.page_bytes()
    needed += held_bodies
    pool.check_capacity(needed, rows_bytes + held_bodies, tokens)


def _body_bytes(store: TieredStore, heads: HeadShares | None, prompt: int, count: float, page: int) -> int:
    """Bytes of the pages of what a layer's heads keep of a turn, so many tokens each on average."""
    heads_here = store.head_shape.heads if heads is None else heads.heads_of(prompt)
    return page_bytes(ceil(count * heads_here), store.body_row_bytes, page)
