"""What the kernels of a step on CUDA read of it: where every layer's rows lie, at fixed places in device memory."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megakv.attention.compiled import Run
from megakv.attention.reference import Scoring
from megakv.attention.step import RowTable, seen_rows
from megakv.device import upload
from megakv.distributed.sharding import TokenBlock, TokenTable

WORDS = len(Run._fields)
MOST_RUNS = 9
"""Of a sequence in a layer: as many segments as `megakv.cache.segments` leaves, and a tail."""
ADDRESS_BYTES, STRIDE_ELEMENTS = 16, 8
"""Of which addresses, and strides and head dims, are multiples, so that reads are wide."""
LEAST_ROWS = 16
"""A product of Triton has as many query rows at least."""
KEYS = ((64, 3), (64, 2), (32, 2))
"""Keys of a tile, and tiles under way: the first of them that has room."""
SHARED_SHARE = 0.9
"""Of the memory that a block of threads shares, which products need some of themselves."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def attends_on_device() -> bool:
    """Whether the kernels can be there: builds of PyTorch for CUDA bring what compiles them."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


LEAST_SHARED_BYTES = 48 << 10
"""Of what every GPU has."""


class Tiles(NamedTuple):
    """Sizes of what a kernel has in hand: powers of two, but for how many tiles of keys are under way."""

    rows: int
    width: int
    value_width: int
    keys: int
    stages: int

    @classmethod
    def of(cls, group: int, dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles | None:
        """Those of so many query rows of a KV head; None where there is no room for them."""
        rows, width, value_width = (max(LEAST_ROWS, 1 << (size - 1).bit_length()) for size in (group, dim, value_dim))
        room = SHARED_SHARE * _shared_bytes(device)
        for keys, stages in KEYS:
            held = rows * (width + keys) + (stages - 1) * keys * (width + value_width)
            if held * dtype.itemsize <= room:
                return cls(rows, width, value_width, keys, stages)
        return None


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_SHARED_BYTES))


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
        group = q_BHSD.shape[1] // k_BKSD.shape[1]
        fits = fits and Tiles.of(group, *dims, q_BHSD.dtype, q_BHSD.device) is not None
        if not fits or not scored or any(stride != 1 for stride in strides):
            return None
        return cls(scoring, *(each.new_empty((each.shape[1], 0, each.shape[3])) for each in (k_BKSD, v_BKSD)))


class Step(Protocol):
    """What is asked of a `megakv.forward_pass.ForwardPass`."""

    cache: Any

    @property
    def tokens(self) -> TokenBlock: ...


class StepTables:
    """Those of steps of up to `size` sequences, in layers of such kinds by index."""

    def __init__(self, kinds: dict[int, LayerKind], size: int, device: torch.device):
        self._kinds, self._size, self._device = kinds, size, device
        self._places = {layer: place for place, layer in enumerate(kinds)}
        layers = len(kinds)
        # Bounds of runs, rows that are not seen, and the runs of all layers behind one another.
        self._skips_at, self._runs_at = layers * (size + 1), layers * (2 * size + 1)
        self._words = torch.zeros(self._runs_at + layers * size * MOST_RUNS * WORDS, dtype=torch.int64, device=device)

    def take(self, step: Step, rank: int) -> bool:
        """Take places for the new rows of a step, and let the kernels know where all rows lie.

        False, with nothing changed, where they cannot read some.
        """
        tokens, tables = step.tokens, list[RowTable]()
        sequences = list(range(tokens.batch))
        for layer, kind in self._kinds.items():
            table = step.cache.store(layer).in_place(sequences, kind.k_KSD, kind.v_KSD)
            if table is None:
                break
            tables.append(table)
        found = self._filled(tables, tokens, step.cache.table, rank) if len(tables) == len(self._kinds) else None
        if found is None:
            for layer in list(self._kinds)[: len(tables)]:
                store = step.cache.store(layer)
                for sequence in sequences:
                    store.crop(sequence, store.rows(sequence) - 1)
            return False
        self._words[: len(found)].copy_(upload(found, self._device), non_blocking=True)
        return True

    def _filled(
        self, tables: list[RowTable], tokens: TokenBlock, held: TokenTable, rank: int
    ) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        windows = {kind.scoring.window for kind in self._kinds.values()}
        seen = {window: seen_rows(tokens, held, rank, window) for window in windows if window is not None}
        runs = [np.frombuffer(table.words, dtype=np.int64).reshape(-1, WORDS) for table in tables]
        joined = np.concatenate(runs)
        aligned = not (joined[:, :2] % ADDRESS_BYTES).any() and not (joined[:, 3:] % STRIDE_ELEMENTS).any()
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
def _kernel() -> Any:
    from megakv.attention.triton_step import attend_step

    return attend_step
