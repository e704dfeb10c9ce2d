"""Decode work of every tensor-parallel rank, done one rank after the other on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.attention.merge import merge_by_owner
from megakv.base.errors import MegaKVError
from megakv.costmodel.stopwatch import Pool
from megakv.weights.products import rows_product

from ..timing import Watch
from .division import Division
from .ragged import HeadShape, RankLayer, TokenPool

WARM_UPS = 3
FLUSH_BYTES = 256 << 20  # Written between runs on a GPU, so that none finds its keys in the cache of the run before
Times = npt.NDArray[np.float64]


class Bench:
    """Times work on one device, by device events where there are any."""

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats
        self.flushes = device.type == "cuda"  # Whether every run finds empty caches
        self._watch = Watch(device)
        self._flush = torch.empty(FLUSH_BYTES * self.flushes, dtype=torch.uint8, device=device)

    def by_turns(self, works: Sequence[Callable[[], Any]]) -> Times:
        """``[repeats, works]`` of functions whose inputs stay where they are, all of them in each round."""
        runs = [self._repeatable(work) for work in works]
        found = np.empty((self.repeats, len(runs)))
        for cell in np.ndindex(found.shape):
            self._flush.zero_()
            with self._watch.span():
                runs[cell[1]]()
            found[cell] = self._watch.seconds()
        return found

    def _repeatable(self, work: Callable[[], Any]) -> Callable[[], Any]:
        if self.device.type != "cuda":
            work()
            return work
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay


class Dense:
    """Matrix products of a rank for a batch of tokens, as the engine forms them, with weights that no cache holds."""

    def __init__(self, shape: HeadShape, hidden: int, intermediate: int, batch: int):
        self._shape, self._hidden, self._intermediate = shape, hidden, intermediate
        self._weights = Pool(shape.dtype, shape.device)
        self._x = self._weights.take(batch, hidden)

    def projections(self, kv_heads: int) -> Tensor:
        """Queries, keys and values of the heads that a rank holds, and its part of the output."""
        kv = kv_heads * self._shape.dim
        widths = kv * self._shape.group, kv, kv
        queries, *_ = (rows_product(self._x, self._weights.take(width, self._hidden)) for width in widths)
        return rows_product(queries, self._weights.take(self._hidden, widths[0]))

    def feed_forward(self, tp: int) -> Tensor:
        """A rank's columns of a gated MLP."""
        columns = self._intermediate // tp
        gate, up = (rows_product(self._x, self._weights.take(columns, self._hidden)) for _ in range(2))
        return rows_product(torch.nn.functional.silu(gate) * up, self._weights.take(self._hidden, columns))


class VirtualRanks:
    """All ranks of a division."""

    def __init__(self, division: Division, pool: TokenPool, batch: int):
        self.division, self._pool, self._batch = division, pool, batch
        # ``[layers, ranks]`` KV heads of each rank, copies included.
        self.held = np.array([[len({p.head for p in rank}) for rank in layer] for layer in division.pieces])

    @torch.inference_mode()
    def outputs(self, layer: int) -> Tensor:
        """``[B K, G, D]`` attention of a layer, all ranks' parts merged."""
        ranks = self.layers([layer])
        outs, lses = (torch.cat(each) for each in zip(*(rank.attend() for rank in ranks), strict=True))
        owners = torch.cat([rank.index for rank in ranks])
        return merge_by_owner(outs, lses, owners, self._batch * self._pool.shape.kv_heads)[0]

    def layers(self, some: Sequence[int]) -> list[RankLayer]:
        """Of some layers, the part of every rank."""
        ranks = range(len(self.division.pieces[0]))
        return [RankLayer(self._pool, self.division, at, rank, self._batch) for at in some for rank in ranks]


@torch.inference_mode()
def attention_seconds(divisions: Sequence[VirtualRanks], bench: Bench) -> Times:
    """``[divisions, repeats, layers, ranks]``; all divisions take turns, so that they meet the same disturbances.

    So do all layers, as in a step, where nothing empties caches.
    """
    layers, found = range(len(divisions[0].division.pieces)), []
    for some in [[layer] for layer in layers] if bench.flushes else [list(layers)]:
        held = [each for ranks in divisions for each in ranks.layers(some)]
        seconds = bench.by_turns([each.attend for each in held])
        found.append(np.moveaxis(seconds.reshape(bench.repeats, len(divisions), len(some), -1), 1, 0))
    return np.concatenate(found, axis=2)


def check_same(name: str, found: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest difference, relative to the largest output."""
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= tolerance:
        raise MegaKVError(f"{name}: outputs differ from those of contiguous heads by {difference:.1e} of the largest")
    return difference
