"""Synthetic ragged caches, and a rank's decode work over them by MegaKV's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.attention.partial import PartialAttention
from megakv.attention.reference import Scoring
from megakv.cache.ragged_attention import RaggedPart
from megakv.cache.ragged_body import RaggedBody
from megakv.costmodel.stopwatch import Pool
from megakv.weights.products import rows_product

from ..timing import Watch
from .division import Division, Piece

MOST_OFFSETS = 1 << 16  # Where in the row of random tokens a head's may begin
WARM_UPS = 3
FLUSH_BYTES = 256 << 20  # Written between runs on a GPU, so that none finds its keys in the cache of the run before
Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeadShape:
    """The heads of a layer."""

    kv_heads: int  # KV heads, query heads that share one, and dimensions
    group: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of a kept token: key and value of one head."""
        return 2 * self.dim * self.dtype.itemsize


class TokenPool:
    """Random keys and values that every rank draws alike: a head's tokens are a stretch of one long row."""

    def __init__(self, shape: HeadShape, longest: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self._offsets = min(4 * longest, MOST_OFFSETS)
        rows = torch.randn(longest + self._offsets, 2 * shape.dim, generator=generator)
        self._rows = rows.to(shape.device, shape.dtype)

    def body(self, layer: int, pieces: Sequence[Piece], rows: Sequence[npt.NDArray[np.int64]]) -> RaggedBody | None:
        """Pieces as if each were a head, with the rows of their tokens; None where they hold nothing."""
        counts = np.array([piece.stop - piece.start for piece in pieces])
        tokens = []
        for piece in pieces:
            # Another head has other ones.
            offset = ((layer * 1009 + piece.sequence) * 1013 + piece.head * 37) % self._offsets
            tokens.append(self._rows[offset + piece.start : offset + piece.stop])
        return RaggedBody.packed(*torch.cat(tokens).split(self.shape.dim, -1), counts, np.concatenate(rows))

    def queries(self, layer: int, batch: int) -> Tensor:
        """``[B K, G, D]`` queries of a layer."""
        shape = self.shape
        generator = torch.Generator().manual_seed(layer + 1)
        queries = torch.randn(batch * shape.kv_heads, shape.group, shape.dim, generator=generator)
        return queries.to(shape.device, shape.dtype)


class RankLayer:
    """Share of one rank in one layer: the pieces of all sequences in one ragged body, as if each were a head."""

    def __init__(self, pool: TokenPool, division: Division, layer: int, rank: int, batch: int):
        shape = pool.shape
        places = [[p.sequence * shape.kv_heads + p.head for p in held] for held in division.pieces[layer]]
        pieces = division.pieces[layer][rank]
        self.index = torch.tensor(places[rank], dtype=torch.long, device=shape.device)
        self._scoring = Scoring(shape.dim**-0.5)
        body = pool.body(layer, pieces, [np.arange(piece.stop - piece.start) for piece in pieces])
        assert body is not None
        slots = np.arange(body.index.last_row + 1)
        self._part, self._slot = RaggedPart(0, body, slots, slots), slots[-1:] + 1
        self._queries = pool.queries(layer, batch)[self.index].flatten(0, 1)[:, None]
        self._group, self._rank, self.rows = shape.group, rank, batch * shape.kv_heads
        # ``[ranks, B K, 1]`` who has no part of which head.
        without = torch.ones(len(places), batch * shape.kv_heads, 1, dtype=torch.bool)
        for other, held in enumerate(places):
            without[other, held] = False
        self._without = without.to(shape.device)

    def attend(self) -> tuple[Tensor, Tensor]:
        """``[n, G, D]`` outputs and log-sum-exps ``[n, G]`` of the pieces."""
        partial = PartialAttention(self._queries, self._slot, self._scoring)
        self._part.add_to(partial)
        return partial.out.view(-1, self._group, partial.value_dim), partial.lse.view(-1, self._group)

    def weigh(self, out: Tensor, lse: Tensor, add_up: Callable[[Tensor], Tensor]) -> None:
        """Weigh the parts of shared heads, in place, so that those of all ranks add up to their attention."""
        everyone = lse.new_zeros(*self._without.shape[:2], self._group)
        everyone[self._rank, self.index] = lse
        add_up(everyone)
        whole = everyone.masked_fill_(self._without, -torch.inf).logsumexp(0)
        out *= torch.exp(lse - whole[self.index]).unsqueeze(-1)


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


class Bench:
    """Times work on one device, by device events where there are any."""

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats
        self._watch, on_gpu = Watch(device), device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES * on_gpu, dtype=torch.uint8, device=device)

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
