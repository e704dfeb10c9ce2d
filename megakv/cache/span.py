"""Some slots of one sequence, taken out of a cache: what prefix stores keep, move to other memory, and put back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megakv.base.errors import MegaKVError
from megakv.base.tensor_files import DTYPES, StreamedTensor, read_tensors, tensor_kinds, write_in_place
from megakv.cache.store import Pair, cut
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import IntArray, Layout, TokenBlock

COORDINATES = ("span", "owners", "positions", "kinds")
"""Of a file, beside keys and values. Those lie in one block for each kind: tensors by the hundred take long to open."""

MOST_LAYERS = 1 << 12
FLOATS = {name for dtype, name in DTYPES.items() if dtype.is_floating_point}


@dataclass(frozen=True, eq=False)
class CacheSpan:
    """Slots from `first` on of one sequence: whose they are, and this rank's keys and values of them.

    It shares its memory with the cache that it was taken from, and with those that it is appended to; none of them
    writes there again. What was read from a file is one block for all layers of a kind, there until none needs it.
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
        return _layout(self.owners, self.positions, self.first, self.size)

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
        blocks: dict[tuple[int, int, torch.dtype], list[tuple[Tensor, ...]]] = {}
        numbers: dict[tuple[int, int, torch.dtype], int] = {}
        kinds = []
        for each in (each for runs in self.layers for each in zip(*runs, strict=True)):
            heads, _, width = each[0].shape
            blocks.setdefault(kind := (heads, width, each[0].dtype), []).append(each)
            kinds.append(numbers.setdefault(kind, len(numbers)))
        header = np.array([self.first, self.rank, self.size, len(self.layers)])
        coordinates = header, self.owners, self.positions, np.array(kinds, dtype=np.int64)
        tensors = {
            name: StreamedTensor.of(torch.from_numpy(each)) for name, each in zip(COORDINATES, coordinates, strict=True)
        }
        tensors |= {str(number): StreamedTensor.stacked(own) for number, own in enumerate(blocks.values())}
        try:
            write_in_place(path, tensors)
        except OSError as error:
            raise MegaKVError(f"{path} cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, paths: Sequence[Path], rank: int, size: int, device: torch.device) -> CacheSpan:
        """What ranks saved, by the files of all of them in their order, for one of as many or of any other number.

        Slots stay with their rank where there are as many, and are spread anew, balanced, where there are not. A
        MegaKVError if a file is missing, truncated, or none of these.
        """
        if len(paths) == size:
            return _SavedSpan.read(paths[rank], rank, size).whole(device)
        saved = [_SavedSpan.read(path, index, len(paths)) for index, path in enumerate(paths)]
        return _spread(saved, rank, size, device)


@dataclass(frozen=True, eq=False)
class _SavedSpan:
    """A rank's file, whose coordinates were found to be such."""

    path: Path
    first: int
    owners: IntArray
    positions: IntArray
    rank: int
    size: int
    layers: int
    kinds: tuple[int, ...]
    """The block of each layer's keys, and of its values, in turns; none of a rank without tokens."""

    @cached_property
    def count(self) -> int:
        """Tokens of the rank."""
        return int(np.count_nonzero(self.owners == self.rank))

    @classmethod
    def read(cls, path: Path, rank: int, size: int) -> _SavedSpan:
        types = tensor_kinds(path)
        if any(types.get(name) != DTYPES[torch.int64] for name in COORDINATES):
            raise MegaKVError(f"{path} holds no span of a cache")
        header, owners, positions, kinds = (each.numpy() for each in read_tensors(path, [*COORDINATES]).values())
        fits = header.shape == (4,) and owners.ndim == kinds.ndim == 1 and owners.shape == positions.shape
        if not fits or header[0] < 0 or (header[1], header[2]) != (rank, size) or not 0 <= header[3] <= MOST_LAYERS:
            raise MegaKVError(f"{path} is broken, or not of rank {rank} of {size}")
        if len(owners) and (owners.min() < -1 or owners.max() >= size or positions.min() < 0):
            raise MegaKVError(f"{path} is broken: its slots are of ranks {owners.min()} to {owners.max()} of {size}")
        layers, blocks = int(header[3]), {str(number) for number in set(kinds.tolist())}
        found = cls(path, int(header[0]), owners.copy(), positions.copy(), rank, size, layers, tuple(kinds.tolist()))
        numbered = blocks == {str(number) for number in range(len(blocks))}
        whole = numbered and set(types) == blocks | {*COORDINATES}
        kind = {types[name] for name in blocks} if whole else set()
        if not whole or len(kind) > 1 or not kind <= FLOATS or len(kinds) != (2 * layers if found.count else 0):
            raise MegaKVError(
                f"{path} is broken: it has {len(types)} tensors, and {len(kinds)} kinds, of {layers} layers"
            )
        return found

    @cached_property
    def blocks(self) -> list[Tensor]:
        """Keys and values ``[N, K, m, D]``, mapped from the file."""
        found = list(read_tensors(self.path, [str(number) for number in range(len(set(self.kinds)))]).values())
        shapes, members = [list(block.shape) for block in found], Counter(self.kinds)
        for number, shape in enumerate(shapes):
            if len(shape) != 4 or shape[0] != members[number] or shape[2] != self.count:
                raise MegaKVError(f"{self.path} is broken: keys and values have the shapes {shapes}")
        if any(
            shapes[keys][1] != shapes[values][1] for keys, values in zip(self.kinds[::2], self.kinds[1::2], strict=True)
        ):
            raise MegaKVError(f"{self.path} is broken: layers have keys and values of {shapes}")
        return found

    def pairs(self, blocks: Sequence[Tensor]) -> tuple[tuple[Pair, ...], ...]:
        """By layer, keys and values in such blocks."""
        each = [iter(block.unbind()) for block in blocks]
        tensors = [next(each[kind]) for kind in self.kinds]
        return tuple(((keys, values),) for keys, values in zip(tensors[::2], tensors[1::2], strict=True))

    def whole(self, device: torch.device) -> CacheSpan:
        """All of it, in memory of its own."""
        copies = [torch.empty_like(block, device=device).copy_(block) for block in self.blocks]
        layers = self.pairs(copies) if self.count else ((),) * self.layers
        return CacheSpan(self.first, self.owners, self.positions, self.rank, self.size, layers)


def _layout(owners: IntArray, positions: IntArray, first: int, size: int) -> Layout:
    """The tokens of every rank, of one sequence."""
    found = (np.flatnonzero(owners == rank) for rank in range(size))
    blocks = tuple(TokenBlock(np.zeros_like(index), index + first, positions[index], 1) for index in found)
    return Layout(blocks, blocks)


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


def _spread(saved: Sequence[_SavedSpan], rank: int, size: int, device: torch.device) -> CacheSpan:
    """The share of a rank of another number of ranks than saved."""
    first = saved[0]
    for other in saved[1:]:
        same = all(np.array_equal(getattr(first, name), getattr(other, name)) for name in ("owners", "positions"))
        if not same or (first.first, first.layers) != (other.first, other.layers):
            raise MegaKVError(f"{other.path} is of other slots than {first.path}")
    held = _layout(first.owners, first.positions, first.first, first.size).stored
    everything, _ = TokenBlock.joined(held)
    layout = balanced(everything, size)
    slots = layout.stored[rank].slot
    moves = [(each, run) for each, block in zip(saved, held, strict=True) for run in _runs(block.slot, slots)]
    if not moves:
        return CacheSpan.of(layout, first.first, first.first + len(first.owners), rank, [()] * first.layers)
    alike = {
        (each.kinds, *((*block.shape[:2], block.shape[3], block.dtype) for block in each.blocks)) for each, _ in moves
    }
    if len(alike) > 1:
        raise MegaKVError(f"{first.path} and the other ranks' files differ in the kinds of their layers")
    like = moves[0][0]
    found = []
    for number, block in enumerate(like.blocks):
        count, heads, _, width = block.shape
        found.append(torch.empty((count, heads, len(slots), width), dtype=block.dtype, device=device))
        for each, (start, to, rows) in moves:
            found[number][:, :, to : to + rows] = each.blocks[number][:, :, start : start + rows]
    return CacheSpan.of(layout, first.first, first.first + len(first.owners), rank, like.pairs(found))


def _runs(held: IntArray, wanted: IntArray) -> list[tuple[int, int, int]]:
    """Runs of ascending slots that go together: where each begins among those held and those wanted, and its length."""
    rows = np.flatnonzero(np.isin(held, wanted))
    to = np.searchsorted(wanted, held[rows])
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(to) != 1)) + 1
    return [(int(rows[a]), int(to[a]), int(b - a)) for a, b in pairwise([0, *cuts.tolist(), len(rows)]) if b > a]
