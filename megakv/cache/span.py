"""Some slots of one sequence, taken out of a cache: what prefix stores keep, move to other memory, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from megakv.base.errors import MegaKVError
from megakv.base.tensor_files import check_types
from megakv.cache.saved import read_rows
from megakv.cache.saved_tokens import SavedSlots, SavedTokens
from megakv.cache.store import Pair, cut, saved_runs
from megakv.distributed.sharding import IntArray, Layout, TokenBlock


@dataclass(frozen=True, eq=False)
class CacheSpan:
    """Slots from `first` on of one sequence: whose they are, and this rank's keys and values of them.

    It shares its memory with the cache that it was taken from, and with those that it is appended to; none of them
    writes there again.
    """

    first: int
    owners: IntArray
    """``[n]`` the context-parallel rank of each slot, -1 where it is padding."""
    positions: IntArray
    """``[n]`` rotary positions."""
    rank: int
    """This context-parallel rank."""
    size: int
    layers: tuple[tuple[Pair, ...], ...]
    """By layer, what lies contiguously of this rank's keys ``[K, m, D]`` and values ``[K, m, Dv]``, in order."""

    def __post_init__(self) -> None:
        own = int(np.count_nonzero(self.owners == self.rank))
        counts = [sum(keys.shape[1] for keys, _ in runs) for runs in self.layers]
        if len(self.owners) != len(self.positions) or any(count != own for count in counts):
            raise ValueError(f"layers have {counts} rows of {own} tokens")

    @classmethod
    def of(cls, layout: Layout, first: int, last: int, rank: int, layers: Sequence[Sequence[Pair]]) -> CacheSpan:
        """The slots up to before `last`, of which every rank holds what the layout says."""
        owners, positions = np.full(last - first, -1), np.zeros(last - first, dtype=np.int64)
        for owner, block in enumerate(layout.stored):
            owners[block.slot - first], positions[block.slot - first] = owner, block.position
        return cls(first, owners, positions, rank, layout.size, tuple(map(tuple, layers)))

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def last(self) -> int:
        """The slot behind the last one."""
        return self.first + len(self.owners)

    @cached_property
    def layout(self) -> Layout:
        """Which of them every rank holds."""
        found = (np.flatnonzero(self.owners == rank) for rank in range(self.size))
        blocks = tuple(TokenBlock(np.zeros_like(at), at + self.first, self.positions[at], 1) for at in found)
        return Layout(blocks, blocks)

    def check_follows(self, length: int, *, rank: int, size: int, layers: int) -> None:
        """Refuse to follow so many slots of a cache, on its rank of so many, of so many layers."""
        if (length, rank, size, layers) != (self.first, self.rank, self.size, len(self.layers)):
            raise ValueError(
                f"slots from {self.first} on, of {len(self.layers)} layers on rank {self.rank} of {self.size}, do not "
                f"follow {length} cached ones of {layers} layers on rank {rank} of {size}"
            )

    def split(self, at: int) -> tuple[CacheSpan, CacheSpan]:
        """The slots before `at`, and those from there on, in the same memory."""
        if not self.first <= at <= self.last:
            raise ValueError(f"slots {self.first} to {self.last} cannot be split at {at}")
        slots = at - self.first
        rows = int(np.count_nonzero(self.owners[:slots] == self.rank))
        before = tuple(cut(runs, 0, rows) for runs in self.layers)
        after = tuple(cut(runs, rows) for runs in self.layers)
        owners, positions = (np.split(each, [slots]) for each in (self.owners, self.positions))
        return (
            CacheSpan(self.first, owners[0], positions[0], self.rank, self.size, before),
            CacheSpan(at, owners[1], positions[1], self.rank, self.size, after),
        )

    def nbytes(self) -> int:
        """Bytes of its keys and values on this rank."""
        return sum(tensor.nbytes for runs in self.layers for pair in runs for tensor in pair)

    @property
    def device(self) -> torch.device | None:
        """Where they lie; None where this rank has none."""
        return next((runs[0][0].device for runs in self.layers if runs), None)

    def to(self, device: torch.device) -> CacheSpan:
        """The same in the memory of a device, in one run per layer; itself where it lies there."""
        if self.device in (device, None):
            return self
        layers = tuple((_joined(runs, device),) if runs else () for runs in self.layers)
        return CacheSpan(self.first, self.owners, self.positions, self.rank, self.size, layers)

    def save(self, path: Path) -> None:
        """Write this rank's file, whole or not at all; a MegaKVError where the disk does not take it."""
        numbered = enumerate(self.layers)
        every = ((f"0.{layer}.{name}", rows) for layer, runs in numbered for name, rows in saved_runs(runs))
        try:
            SavedSlots(self.first, self.last, len(self.layers), self.layout.stored).write(path, self.rank, dict(every))
        except OSError as error:
            raise MegaKVError(f"{path} cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, paths: Sequence[Path], rank: int, size: int, device: torch.device) -> CacheSpan:
        """What ranks saved, by the files of all of them in their order, for one of as many or of any other number.

        Slots stay with their rank where there are as many: only its own file is read then. They are spread anew,
        balanced, where there are not. A MegaKVError if a file is missing, truncated, or none of these.
        """
        files = {rank: paths[rank]} if len(paths) == size else dict(enumerate(paths))
        for path in files.values():
            check_types(path)
        saved = SavedSlots.read(files, len(paths))
        layout = saved.layout(size)
        held = [saved.held[each].slot for each in files]
        tokens, layers = SavedTokens(held, layout.stored[rank].slot, ()), list[tuple[Pair, ...]]()
        try:
            for layer in range(saved.layers if len(tokens.slots) else 0):
                rows = read_rows(list(files.values()), f"0.{layer}.", tokens)
                if rows is None:
                    raise ValueError(f"layer {layer} is missing")
                keys, values = (tensor.to(device, copy=True) for tensor in rows)
                layers.append(((keys, values),))
        except (ValueError, RuntimeError) as error:
            raise MegaKVError(f"{', '.join(map(str, files.values()))}: broken: {error}") from error
        return cls.of(layout, saved.first, saved.last, rank, layers or ((),) * saved.layers)


def _joined(runs: Sequence[Pair], device: torch.device) -> Pair:
    """A copy in one run."""
    found = []
    for kind in range(2):
        tensors = [run[kind] for run in runs]
        heads, _, width = tensors[0].shape
        bounds = np.cumsum([0, *(tensor.shape[1] for tensor in tensors)]).tolist()
        copy = torch.empty((heads, bounds[-1], width), dtype=tensors[0].dtype, device=device)
        for tensor, (start, stop) in zip(tensors, pairwise(bounds), strict=True):
            copy[:, start:stop] = tensor
        found.append(copy)
    return found[0], found[1]
