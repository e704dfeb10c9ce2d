"""What the kernels of a step on CUDA read of it: where every layer's rows lie, at fixed places in device memory."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megakv.attention.backends import trusted
from megakv.attention.compiled import RUN_WORDS, RowTable, Run
from megakv.attention.merge import add_sinks
from megakv.attention.reference import Scoring, dense_attention
from megakv.attention.step import seen_rows
from megakv.attention.tiles import Tiles
from megakv.base.device import pinned
from megakv.distributed.sharding import TokenBlock, TokenTable

MOST_RUNS = 9
"""Of a sequence in a layer: as many segments as `megakv.cache.segments` leaves, and a tail."""
ADDRESS_BYTES, STRIDE_ELEMENTS = 16, 8
"""Of which addresses, and strides and head dims, are multiples, so that reads are wide."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)
"""Of GPUs for which Triton compiles products of all three types."""


def attends_on_device() -> bool:
    """Whether the kernels can be there: builds of PyTorch for CUDA bring what compiles them."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability() >= LEAST_CAPABILITY


@dataclass(frozen=True)
class LayerKind:
    """How a layer attends, and a ``[K, 0, D]`` and a ``[K, 0, Dv]`` of its keys and values."""

    scoring: Scoring
    k_KSD: Tensor
    v_KSD: Tensor

    @classmethod
    def of(cls, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring) -> LayerKind | None:
        """That of what a layer is given; None where the kernels do not take it."""
        kinds, dims = {q_BHSD.dtype, k_BKSD.dtype, v_BKSD.dtype}, (k_BKSD.shape[3], v_BKSD.shape[3])
        strides = (each.stride(3) for each in (q_BHSD, k_BKSD, v_BKSD))
        scored = scoring.alibi_slopes is None and scoring.latent is None and scoring.value_columns is None
        fits = len(kinds) == 1 and kinds <= {*TYPES} and not any(dim % STRIDE_ELEMENTS for dim in dims)
        if not fits or not scored or any(stride != 1 for stride in strides):
            return None
        group, device = q_BHSD.shape[1] // k_BKSD.shape[1], q_BHSD.device
        if Tiles.of(group, *dims, q_BHSD.dtype, device) is None or not _agrees(group, *dims, q_BHSD.dtype, device):
            return None
        return cls(scoring, *(each.new_empty((each.shape[1], 0, each.shape[3])) for each in (k_BKSD, v_BKSD)))


class StepTables:
    """Those of steps of up to `size` sequences, in layers of such kinds by index."""

    def __init__(self, kinds: dict[int, LayerKind], size: int, device: torch.device):
        self._kinds, self._size, self._device = kinds, size, device
        self._places = {layer: place for place, layer in enumerate(kinds)}
        layers = len(kinds)
        # Bounds of runs, rows that are not seen, and the runs of all layers behind one another.
        self._skips_at, self._runs_at = layers * (size + 1), layers * (2 * size + 1)
        self._words = torch.zeros(
            self._runs_at + layers * size * MOST_RUNS * RUN_WORDS, dtype=torch.int64, device=device
        )

    def take(self, cache: Any, tokens: TokenBlock, rank: int) -> bool:
        """Take places for the new rows of a step, and let the kernels know where all rows of the cache lie.

        False, with nothing changed, where they cannot read some.
        """
        tables, new = list[RowTable](), [1] * tokens.batch
        for layer, kind in self._kinds.items():
            table = cache.store(layer).in_place(new, kind.k_KSD, kind.v_KSD)
            if table is None:
                break
            tables.append(table)
        found = self._filled(tables, tokens, cache.table, rank) if len(tables) == len(self._kinds) else None
        if found is None:
            for layer in list(self._kinds)[: len(tables)]:
                store = cache.store(layer)
                for sequence in range(tokens.batch):
                    store.crop(sequence, store.rows(sequence) - 1)
            return False
        self._words[: len(found)].copy_(pinned(found, self._device), non_blocking=True)
        return True

    def _filled(
        self, tables: list[RowTable], tokens: TokenBlock, held: TokenTable, rank: int
    ) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        windows = {kind.scoring.window for kind in self._kinds.values()}
        seen = {window: seen_rows(tokens, held, rank, window) for window in windows if window is not None}
        runs = [np.frombuffer(table.words, dtype=np.int64).reshape(-1, RUN_WORDS) for table in tables]
        joined = np.concatenate(runs)
        aligned = not (joined[:, :2] % ADDRESS_BYTES).any() and not (joined[:, 3:7] % STRIDE_ELEMENTS).any()
        if not aligned or self._runs_at + joined.size > len(self._words):
            return None
        found = np.zeros(self._runs_at + joined.size, dtype=np.int64)
        bounds = found[: self._skips_at].reshape(-1, self._size + 1)
        skips = found[self._skips_at : self._runs_at].reshape(-1, self._size)
        found[self._runs_at :] = joined.ravel()
        before = 0
        for place, (table, kind) in enumerate(zip(tables, self._kinds.values(), strict=True)):
            ends = [before, *accumulate(table.counts, initial=before)][1:]
            bounds[place, : len(ends)] = ends
            # Sequences that are not there have no runs.
            before = ends[-1]
            bounds[place, len(ends) :] = before
            if kind.scoring.window is not None:
                skips[place, : tokens.batch] = np.maximum(seen[kind.scoring.window] - np.array(table.gone), 0)
        return found

    def attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """``[1, L, H, Dv]`` of a layer's new tokens, whose keys and values are stored."""
        place, size = self._places[layer], self._size
        assert scoring == self._kinds[layer].scoring, "a layer attends as it was not seen to"
        first = place * (size + 1)
        return _kernel()(
            q_BHSD,
            k_BKSD,
            v_BKSD,
            scoring.scale,
            self._words[first : first + size + 1],
            self._words[self._skips_at + place * size : self._skips_at + (place + 1) * size],
            self._words[self._runs_at :],
            softcap=scoring.softcap,
            sinks=sinks,
        )


@functools.cache
def _agrees(group: int, dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels give the reference's results, tried once on a small example."""
    generator, lengths, kv_heads = torch.Generator("cpu").manual_seed(0), (70, 1), 2

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    pairs = [(drawn(kv_heads, length, dim), drawn(kv_heads, length, value_dim)) for length in lengths]
    q, sinks = drawn(len(lengths), kv_heads * group, dim).transpose(0, 1)[None], drawn(kv_heads * group)
    k, v = (torch.stack([pair[kind][:, -1] for pair in pairs], dim=1)[None] for kind in range(2))
    held = [tuple(each.clone() for each in pair) for pair in pairs]
    for keys, values in held:
        # The kernels are to write them.
        keys[:, -1], values[:, -1] = 0, 0
    tables = ([0, 1, 2], [0, 0], [list(Run.of(*pair)) for pair in held])
    places = [torch.tensor(each, dtype=torch.int64, device=device) for each in tables]
    wanted = []
    for row, (keys, values) in enumerate(pairs):
        out, lse = dense_attention(q[0, :, row, None], keys, values, dim**-0.5)
        wanted.append(add_sinks(out, lse, sinks))

    def kernels() -> tuple[Tensor, Tensor]:
        out = _kernel()(q, k, v, dim**-0.5, *places, sinks=sinks)
        return out[0, 0, :, None], out[0, 1, :, None]

    case = f"{dtype} with {group} heads of {dim}, {value_dim} on {device}"
    return trusted(kernels, [(kernels, (wanted[0], wanted[1]))], dtype, f"steps of decoding, {case}")


@functools.cache
def _kernel() -> Any:
    from megakv.attention.triton_step import attend_step

    return attend_step
