"""What a saved session holds of one sequence, for a layer's store to read back what stores of all ranks wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megakv.distributed.sharding import IntArray
from megakv.tensor_files import read_tensors, read_where_present


@dataclass(frozen=True)
class SavedTokens:
    """A sequence's tokens, the same in all layers.

    `held` are the slots that each rank had when it saved, `slots` those that this rank has now, both ascending.
    `compressed` has the first slot of each compressed range and the one behind its last.
    """

    held: Sequence[IntArray]
    slots: IntArray
    compressed: Sequence[Sequence[int]]

    @cached_property
    def uncompressed(self) -> SavedTokens:
        """Those in none of the compressed ranges."""

        def outside(slots: IntArray) -> IntArray:
            within = [(slots >= first) & (slots < last) for first, last in self.compressed]
            return slots[~np.any(within, axis=0)] if within else slots

        return SavedTokens([outside(slots) for slots in self.held], outside(self.slots), ())

    @cached_property
    def sources(self) -> list[Tensor]:
        """Which rows of each file are this rank's now."""
        return [torch.from_numpy(np.flatnonzero(np.isin(slots, self.slots))) for slots in self.held]

    @cached_property
    def order(self) -> Tensor:
        """Puts those rows, file after file, in the order of their slots."""
        found = [slots[rows.numpy()] for slots, rows in zip(self.held, self.sources, strict=True)]
        return torch.from_numpy(np.argsort(np.concatenate(found)))


@dataclass(frozen=True)
class SavedLayer:
    """One layer of them: `files` are those of all ranks that saved, `prefix` begins the names of its tensors.

    A missing, truncated or foreign file is a `MegaKVError`; tensors that do not fit together are a `ValueError`.
    """

    files: Sequence[Path]
    prefix: str
    tokens: SavedTokens
    device: torch.device

    def uncompressed(self) -> SavedLayer:
        """The same of the other tokens alone."""
        return replace(self, tokens=self.tokens.uncompressed)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values that all heads hold alike, of this rank's tokens: mapped from a file that has just them."""
        parts: list[tuple[Tensor, ...]] = []
        for path, held, rows in zip(self.files, self.tokens.held, self.tokens.sources, strict=True):
            if len(rows):
                pair = tuple(read_tensors(path, [f"{self.prefix}k", f"{self.prefix}v"]).values())
                if any(tensor.dim() != 3 or tensor.shape[1] != len(held) for tensor in pair):
                    raise ValueError(f"{path.name} has keys and values of {[list(tensor.shape) for tensor in pair]}")
                parts.append(pair if len(rows) == len(held) else tuple(tensor[:, rows] for tensor in pair))
        if len(parts) == 1:
            # In the order of its file.
            keys, values = parts[0]
        else:
            keys, values = (torch.cat(each, dim=1)[:, self.tokens.order] for each in zip(*parts, strict=True))
        return keys.to(self.device), values.to(self.device)

    def parts(self, kind: str, *names: str) -> list[dict[str, Tensor]]:
        """Named tensors of a kind, of every file that has them."""
        wanted = [f"{self.prefix}{kind}{name}" for name in names]
        return [dict(zip(names, found.values(), strict=True)) for found in read_where_present(self.files, wanted)]
