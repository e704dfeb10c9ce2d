"""Files of keys and values, one for each rank, of sessions and of kept prefixes alike: whose tokens are in them.

Such a file is safetensors. Its metadata say the format, the rank of how many, and which slots of how many layers.
``tokens`` ``[4, L]`` are the sequence, slot, position and rank of all ranks' tokens; ``SEQUENCE.LAYER.NAME`` is what
the store of a layer holds of this rank's, as `KVStore.save` names it. Rows of keys and values ascend by slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megakv.base.errors import MegaKVError
from megakv.base.tensor_files import StreamedTensor, read_metadata, read_tensors, write_tensors
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import IntArray, Layout, TokenBlock

FORMAT = 5
"""Version of these files, and of the JSON beside them that says what they belong to. Others are not read."""
NUMBERS = ("rank", "size", "first", "last", "layers")
"""Of the metadata, beside the format."""
MOST_LAYERS, MOST_SLOTS = 1 << 12, 1 << 40


def check_format(found: Any, path: Path, advice: str) -> None:
    """Refuse files of another version."""
    if found != FORMAT:
        raise MegaKVError(f"{path} has format {found!r}, this version reads format {FORMAT}: {advice}")


@dataclass(frozen=True)
class SavedSlots:
    """Slots from `first` to before `last` in `layers` layers, and the tokens that each rank holds of them."""

    first: int
    last: int
    layers: int
    held: tuple[TokenBlock, ...]

    def write(self, path: Path, rank: int, tensors: Mapping[str, StreamedTensor]) -> None:
        """Write a rank's file, whole or not at all, as `write_tensors` does."""
        everything, order = TokenBlock.joined(self.held)
        owners = np.repeat(np.arange(len(self.held)), [len(block) for block in self.held])[order]
        tokens = np.stack([everything.sequence, everything.slot, everything.position, owners])
        numbers = zip(NUMBERS, (rank, len(self.held), self.first, self.last, self.layers), strict=True)
        metadata = {"format": str(FORMAT)} | {name: str(number) for name, number in numbers}
        write_tensors(path, {"tokens": StreamedTensor.of(torch.from_numpy(tokens)), **tensors}, metadata)

    @classmethod
    def read(cls, files: Mapping[int, Path], size: int, batch: int = 1) -> SavedSlots:
        """Read what files of some of so many ranks, by rank, agree on.

        A MegaKVError if one is missing, broken or none of these.
        """
        (path, *others), read = files.values(), [_read_slots(path, rank, size) for rank, path in files.items()]
        (first, last, layers), tokens = read[0]
        for other, (numbers, found) in zip(others, read[1:], strict=True):
            if numbers != (first, last, layers) or not np.array_equal(found, tokens):
                raise MegaKVError(f"{other} is of other slots than {path}")
        everything = TokenBlock(tokens[0], tokens[1], tokens[2], batch)
        limits = zip(tokens, (0, first, 0, 0), (batch, last, np.iinfo(np.int64).max, size), strict=True)
        within = all(((low <= column) & (column < high)).all() for column, low, high in limits)
        if not within or (np.diff(everything.keys(last)) <= 0).any():
            raise MegaKVError(f"{path} is broken: its tokens are not ascending slots from {first} to before {last}")
        return cls(first, last, layers, tuple(everything.take(tokens[3] == rank) for rank in range(size)))

    def layout(self, size: int) -> Layout:
        """Tokens of so many ranks that read: where they were, or spread anew, balanced, where ranks are others."""
        if size == len(self.held):
            return Layout(self.held, self.held)
        return balanced(TokenBlock.joined(self.held)[0], size)


def _read_slots(path: Path, rank: int, size: int) -> tuple[tuple[int, ...], IntArray]:
    """The first slot, the one behind the last, the layers, and the ``[4, L]`` tokens of a rank's file."""
    said = read_metadata(path)
    found = said.get("format", "")
    number = int(found) if found.isdecimal() and len(found) < 10 else None
    check_format(number, path, "go on with the version of MegaKV that saved it")
    tokens = read_tensors(path, ["tokens"])["tokens"].numpy()
    try:
        own, ranks, first, last, layers = (int(said[name]) for name in NUMBERS)
    except (KeyError, ValueError) as error:
        raise MegaKVError(f"{path} is broken: its metadata lack {error}") from error
    sound = 0 <= first <= last < MOST_SLOTS and 0 <= layers <= MOST_LAYERS and tokens.ndim == 2 and len(tokens) == 4
    if (own, ranks) != (rank, size) or not sound:
        raise MegaKVError(f"{path} is broken, or not of rank {rank} of {size}")
    return (first, last, layers), tokens.copy()


@dataclass(frozen=True)
class SavedTokens:
    """A sequence's tokens.

    `held` are the slots that each rank had when it saved, `slots` those that this rank has now, both ascending.
    `compressed` has the first slot of each compressed range and the one behind its last. What lay before slot `first`
    the layer's window had left behind: of that nothing was saved.
    """

    held: Sequence[IntArray]
    slots: IntArray
    compressed: Sequence[Sequence[int]]
    first: int = 0

    @cached_property
    def uncompressed(self) -> SavedTokens:
        """Those in none of the compressed ranges."""

        def outside(slots: IntArray) -> IntArray:
            within = [(slots >= first) & (slots < last) for first, last in self.compressed]
            return slots[~np.any(within, axis=0)] if within else slots

        return SavedTokens([outside(slots) for slots in self.held], outside(self.slots), (), self.first)

    @property
    def absent(self) -> int:
        """How many of this rank's tokens were left behind."""
        return int(np.searchsorted(self.slots, self.first))

    @cached_property
    def saved(self) -> list[IntArray]:
        """The slots that each file has."""
        return [slots[slots >= self.first] for slots in self.held]

    @cached_property
    def sources(self) -> list[torch.Tensor]:
        """Which rows of each file are this rank's now."""
        return [torch.from_numpy(np.flatnonzero(np.isin(slots, self.slots))) for slots in self.saved]

    @cached_property
    def order(self) -> torch.Tensor:
        """Puts those rows, file after file, in the order of their slots."""
        found = [slots[rows.numpy()] for slots, rows in zip(self.saved, self.sources, strict=True)]
        return torch.from_numpy(np.argsort(np.concatenate(found)))
