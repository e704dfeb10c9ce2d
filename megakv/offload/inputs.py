"""Activations of tokens: handed to their stores as layers compute, and made keys and values of again as they land."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from megakv.attention.together import alike, stacked
from megakv.costmodel.offload_disk import placed
from megakv.costmodel.offload_pipeline import RESIDENT
from megakv.device import upload
from megakv.distributed.sharding import TokenBlock, TokenTable
from megakv.offload.record import StepRecord
from megakv.offload.scheduler import divide
from megakv.offload.staging import Piece, StagedLayer
from megakv.offload.store import TieredStore

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.runtime import Offloader


def inputs_pay(
    offloader: Offloader,
    store: TieredStore,
    prompts: Sequence[int],
    announced: tuple[int, int] | None,
    layers: int,
) -> bool:
    """Whether a prompt's activations are worth the host memory that they would take from keys and values.

    What has no room there lies on disk, where the host cannot attend to it. Known once an earlier generation has shown
    what everything costs; until then, and where there is no disk, activations are kept.

    Parameters
    ----------
    offloader : Offloader
    store : TieredStore
        Of the first layer, empty.
    prompts : sequence of int
        Tokens of every sequence that come now.
    announced : tuple of int, optional
        Columns of the whole prompt, and tokens that each sequence may get beyond it.
    layers : int
        Attention layers.
    """
    config, costs, pool = offloader.config, offloader.costs, offloader.pool
    profile, chunk = costs.profile, config.chunk_tokens
    if config.method != "auto" or config.weights or pool.disk is None or profile is None or not costs.settled:
        return True
    if not (profile.input_bytes and profile.recompute_s and profile.host_attend_s):
        return True
    tokens = [count + announced[1] if announced else count for count in prompts]
    memory = pool.free_bytes(pool.tiers[0]) / layers
    if memory >= sum(tokens) * (profile.row_bytes + profile.input_bytes):
        return True
    measured, seconds = costs.layer(store, None, None), []
    for plan, input_bytes in (("all", profile.input_bytes), ("cpu_rank", 0)):
        own = costs.of_plan(plan, measured)
        lots = placed(tokens, memory, row_bytes=profile.row_bytes, input_bytes=input_bytes)
        division = divide(
            own,
            sum(tokens),
            chunk=chunk,
            host=sum(lot.rows_in_memory for lot in lots),
            most=sum(lot.inputs for lot in lots),
            lots=lots,
        )
        seconds.append(costs.predict(own, [division], layers, RESIDENT, chunk=chunk, ahead=True, lots=[lots]))
    return seconds[0] <= seconds[1]


def offer(store: TieredStore, mine: TokenBlock, hidden_LE: Tensor, kept: np.ndarray | None) -> None:
    """Hand the inputs of the tokens that this rank stores to their store.

    Parameters
    ----------
    store : TieredStore
    mine : TokenBlock
        The tokens that this rank stores.
    hidden_LE : Tensor
        ``[L, h]`` inputs of the layer's attention module.
    kept : ndarray, optional
        Of the packed rows, those of `mine`; None for all.
    """
    # A copy: the model may go on to work on its own tensor in place.
    hidden_LE = hidden_LE.clone() if kept is None else hidden_LE[upload(kept, hidden_LE.device)]
    for sequence in range(mine.batch):
        run = mine.run(sequence)
        if run.stop > run.start:
            store.offer(sequence, hidden_LE[run])


def recompute(
    layer: int, staged: StagedLayer, table: TokenTable, rank: int, recomputation: Recomputation, record: StepRecord
) -> None:
    """Write keys and values of a layer's activations into its buffer, chunk by chunk as they land.

    Parameters
    ----------
    layer : int
        One that has begun in the pass under way.
    staged : StagedLayer
    table : TokenTable
    rank : int
        This rank's in it.
    recomputation : Recomputation
    record : StepRecord
        Takes the time.
    """
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
