"""Activations of tokens: handed to their stores as layers compute, and made keys and values of again as they land."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from megakv.attention.together import alike, stacked
from megakv.device import upload
from megakv.distributed.sharding import TokenBlock, TokenTable
from megakv.offload.record import StepRecord
from megakv.offload.staging import Piece, StagedLayer
from megakv.offload.store import TieredStore

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation


def offer(store: TieredStore, mine: TokenBlock, hidden_LE: Tensor, kept: np.ndarray | None) -> None:
    """Hand the inputs ``[L, h]`` of the tokens that this rank stores, those at `kept` or all, to their store."""
    # A copy: the model may go on to work on its own tensor in place.
    hidden_LE = hidden_LE.clone() if kept is None else hidden_LE[upload(kept, hidden_LE.device)]
    for sequence in range(mine.batch):
        run = mine.run(sequence)
        if run.stop > run.start:
            store.offer(sequence, hidden_LE[run])


def recompute(
    layer: int, staged: StagedLayer, table: TokenTable, rank: int, recomputation: Recomputation, record: StepRecord
) -> None:
    """Write keys and values of a layer's activations into its buffer, chunk by chunk as they land."""
    begun = record.clock.mark()
    for chunk in staged.chunks:
        chunk.transfer.wait()
        landed = record.clock.mark()
        positions = [
            table.positions(rank, piece.sequence)[piece.first : piece.first + piece.count] for piece in chunk.pieces
        ]
        keys, values = recomputation.recompute(layer, chunk.inputs, np.concatenate(positions))
        _put(staged, chunk.pieces, keys, values)
        ended = record.clock.mark()
        record.recomputed(begun, landed, ended)
        begun = ended
    staged.chunks = []


def _put(staged: StagedLayer, pieces: Sequence[Piece], k_KLD: Tensor, v_KLD: Tensor) -> None:
    """Write the keys and values of pieces of sequences into the buffer, in few copies."""
    buffers = staged.store.heads_of(staged.rows)
    first, count = [staged.row(piece.sequence, piece.first) for piece in pieces], [piece.count for piece in pieces]
    bounds = [0, *accumulate(count)]
    for begin, end in alike(first, count):
        span = slice(bounds[begin], bounds[end])
        for buffer, found in zip(buffers, (k_KLD, v_KLD), strict=True):
            target_BKSD = stacked(buffer, first[begin:end], count[begin])
            target_BKSD.copy_(found[:, span].unflatten(1, (end - begin, -1)).transpose(0, 1))
