"""What a saved session holds of one sequence, for a layer's store to read back what stores of all ranks wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megakv.base.tensor_files import read_where_present
from megakv.cache.notes import Notes
from megakv.cache.saved_tokens import SavedTokens
from megakv.cache.shares import HeadShares
from megakv.distributed.sharding import IntArray

Heads = Sequence[Sequence[int]]
"""Of a layer, by tensor-parallel rank: its KV heads, by their index in the whole model, in the order of its tensors."""


class KeptTokens(NamedTuple):
    """Tokens that heads have kept, head after head, slots ascending in each.

    The local head ``[n]`` and the slot ``[n]`` of each, its key ``[n, D]`` and its value ``[n, Dv]``.
    """

    head: IntArray
    slot: IntArray
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class SavedLayer:
    """One layer of them: `files` are those of all ranks that saved, by tensor-parallel and then context-parallel rank,
    and `prefix` begins the names of its tensors. `heads` lay on these ranks, and `own` are this one's now.

    Where both are placed alike, `alike` is the tensor-parallel rank, which finds in its own files all that it has kept.
    Elsewhere `shares` divide what shared heads have kept.

    A missing, truncated or foreign file is a `MegaKVError`; tensors that do not fit together are a `ValueError`.
    """

    files: Sequence[Sequence[Path]]
    prefix: str
    tokens: SavedTokens
    device: torch.device
    heads: Heads
    own: Sequence[int]
    alike: int | None = None
    shares: HeadShares | None = None
    prompt: int = 0
    """As which the sequence goes on (`TokenTable.prompts`)."""
    noted: bool = True
    """Whether what was noted of attention can be told apart by heads."""

    def uncompressed(self) -> SavedLayer:
        """The same of the other tokens alone."""
        return replace(self, tokens=self.tokens.uncompressed)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys ``[K, n, D]`` and values ``[K, n, Dv]`` of this rank's tokens, which all of its heads hold; none of
        what was left behind.
        """
        keys, values = self._run() or (torch.stack(each) for each in zip(*map(self._head, self.own), strict=True))
        return keys.to(self.device), values.to(self.device)

    def _run(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of heads that lie beside one another in one rank's files, in the order of the own ones."""
        for held, files in zip(self.heads, self.files, strict=True):
            first = held.index(self.own[0]) if self.own[0] in held else 0
            run = slice(first, first + len(self.own))
            if list(held[run]) == list(self.own):
                return read_rows(files, self.prefix, self.tokens, run)
        return None

    def _head(self, head: int) -> tuple[Tensor, Tensor]:
        """Keys ``[n, D]`` and values of a head, which lies on one rank, or in parts on several."""
        slots: list[IntArray] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        for held, files in zip(self.heads, self.files, strict=True):
            if head not in held:
                continue
            index, whole = list(held).index(head), False
            for path, all_slots in zip(files, self.tokens.saved, strict=True):
                pair = _pair(path, self.prefix, len(all_slots))
                alone = 0 if pair is None else len(pair[0])
                if pair is not None and index < alone:
                    slots, pairs, whole = [*slots, all_slots], [*pairs, (pair[0][index], pair[1][index])], True
                    continue
                for part in read_where_present([path], [f"{self.prefix}shared{index - alone}.slots"]):
                    (own,) = (tensor.numpy() for tensor in part.values())
                    shared = _pair(path, f"{self.prefix}shared{index - alone}.", len(own))
                    if shared is None or len(shared[0]) != 1:
                        raise ValueError(f"{path.name} has no keys and values of shared{index - alone}")
                    slots, pairs = [*slots, own], [*pairs, (shared[0][0], shared[1][0])]
            if whole:
                # The other ranks that hold it have copies.
                break
        found, wanted = np.concatenate([np.empty(0, dtype=np.int64), *slots]), self.tokens.slots[self.tokens.absent :]
        order = np.argsort(found, kind="stable")
        order = order[np.isin(found[order], wanted)]
        if not np.array_equal(found[order], wanted):
            raise ValueError(f"head {head} lacks tokens, or has some twice")
        keys, values = (torch.cat(each)[torch.from_numpy(order)] for each in zip(*pairs, strict=True))
        return keys, values

    def kept(self) -> KeptTokens | None:
        """What heads have kept of this rank's compressed tokens, for it to hold; None where that is nothing.

        A rank numbers those ranges alone of which it had tokens, so whose they are is told by their slots.
        """
        parts = [part for at in self._sources() for part in self._kept_of(at)]
        if not parts:
            return None
        head, slot = (np.concatenate([part[index] for part in parts]) for index in range(2))
        mine = np.isin(slot, self.tokens.slots)
        places = np.flatnonzero(mine)[np.lexsort((slot[mine], head[mine]))]
        head, slot = head[places], slot[places]
        # Whole copies of a head have kept the same.
        first = np.append(True, (np.diff(head) != 0) | (np.diff(slot) != 0))[: len(head)]
        if self.alike is None and self.shares is not None:
            counted = np.cumsum(first)
            within = counted - counted[np.searchsorted(head, head)]
            for index in range(len(self.shares.patterns)):
                first &= (head != self.shares.alone + index) | self.shares.own_tokens(index, self.prompt, within)
        rows = torch.from_numpy(places[first])
        keys = torch.cat([part[2] for part in parts])[rows].to(self.device)
        values = torch.cat([part[3] for part in parts])[rows].to(self.device)
        return KeptTokens(head[first], slot[first], keys, values)

    def moved(self) -> tuple[int, int] | None:
        """By how many positions the tokens before a slot count as further on, and that slot; None where none do."""
        for files in self.files:
            for found in read_where_present(files, [f"{self.prefix}moved"]):
                shift, slot = found[f"{self.prefix}moved"].tolist()
                if shift < 0:
                    raise ValueError(f"its tokens are moved by {shift} positions")
                return shift, slot
        return None

    def notes(self, rank: int, size: int) -> Notes:
        """What was noted of attention to tokens of this rank's heads; of queries, its share of all ranks'."""
        notes = Notes()
        if not self.noted:
            return notes
        for at in self._sources():
            index = np.array([self.own.index(head) if head in self.own else -1 for head in self.heads[at]])
            names = [f"{self.prefix}noted.{name}" for name in ("heads", "held", "mass")]
            for found in read_where_present(self.files[at], names):
                local, slots, mass = found.values()
                if not local.shape == slots.shape == mass.shape or local.dim() != 1:
                    raise ValueError("heads, slots and masses differ in length")
                heads = index[local.numpy()]
                mine = np.flatnonzero(heads >= 0)
                given = mass[torch.from_numpy(mine)].to(self.device)
                notes = notes.with_mass(heads[mine], slots.numpy()[mine], given)
        # Of each KV head, where it lies first.
        first = {head: at for at in reversed(self._sources()) for head in self.heads[at]}
        held = {at: self._queries(at) for at in {first[head] for head in self.own if head in first}}
        every = [held[first[head]] for head in self.own if head in first]
        if any(not np.array_equal(slots, every[0][0]) for slots, _ in every):
            raise ValueError("ranks differ in the queries that were noted")
        if len(every) < len(self.own) or not every or not len(every[0][0]):
            return notes
        rows = np.arange(rank, len(every[0][0]), size)
        chosen = torch.from_numpy(rows)
        groups = [
            found_queries[chosen, list(self.heads[first[head]]).index(head)]
            for head, (_, found_queries) in zip(self.own, every, strict=True)
        ]
        return notes.joined(every[0][0][rows], torch.cat(groups, dim=1).to(self.device))

    def _queries(self, at: int) -> tuple[IntArray, Tensor]:
        """Slots ``[n]`` and noted queries ``[n, K, G, D + 1]`` of a tensor-parallel rank's heads, over all files."""
        slots, parts = [np.empty(0, dtype=np.int64)], []
        for found in read_where_present(
            self.files[at], [f"{self.prefix}noted.{name}" for name in ("slots", "queries")]
        ):
            own, queries = found.values()
            if queries.dim() != 3 or len(queries) != len(own) or queries.shape[1] % len(self.heads[at]):
                raise ValueError(f"noted queries have the shape {list(queries.shape)}")
            slots.append(own.numpy())
            parts.append(queries.unflatten(1, (len(self.heads[at]), -1)))
        order = np.argsort(np.concatenate(slots), kind="stable")
        every = torch.cat(parts)[torch.from_numpy(order)] if parts else torch.empty(0)
        return np.concatenate(slots)[order], every

    def _sources(self) -> Sequence[int]:
        """The tensor-parallel ranks whose files have what this one's heads keep."""
        return range(len(self.files)) if self.alike is None else (self.alike,)

    def _kept_of(self, rank: int) -> Iterator[tuple[IntArray, IntArray, Tensor, Tensor]]:
        """Of the compressed tokens in a rank's files: this rank's heads, slots, keys and values."""
        index = np.array([self.own.index(head) if head in self.own else -1 for head in self.heads[rank]])
        for number in range(len(self.tokens.compressed)):
            names = [f"{self.prefix}kept{number}.{name}" for name in ("counts", "slots", "k", "v")]
            for found in read_where_present(self.files[rank], names):
                counts, slots, keys, values = found.values()
                lengths = {int(counts.sum()), len(slots), len(keys), len(values)}
                if len(lengths) > 1 or counts.shape != (len(index),) or keys.dim() != 2 or values.dim() != 2:
                    raise ValueError("counts, slots, keys and values differ in length")
                head = np.repeat(index, counts.numpy())
                own = np.flatnonzero(head >= 0)
                rows = torch.from_numpy(own)
                yield head[own], slots.numpy()[own], keys[rows], values[rows]


def read_rows(
    files: Sequence[Path], prefix: str, tokens: SavedTokens, heads: slice = slice(None)
) -> tuple[Tensor, Tensor] | None:
    """Keys ``[K, n, D]`` and values ``[K, n, Dv]`` of a rank's tokens that lie in the files of some ranks, in the order
    of their slots; mapped from its file where one has them all. None where a file has not all the heads.
    """
    parts: list[tuple[Tensor, ...]] = []
    for path, slots, rows in zip(files, tokens.saved, tokens.sources, strict=True):
        if not len(rows):
            continue
        pair = _pair(path, prefix, len(slots))
        if pair is None or len(pair[0]) < (heads.stop or 0):
            return None
        of_heads = tuple(tensor[heads] for tensor in pair)
        parts.append(of_heads if len(rows) == len(slots) else tuple(tensor[:, rows] for tensor in of_heads))
    if len(parts) == 1:
        return parts[0][0], parts[0][1]
    keys, values = (torch.cat(each, dim=1)[:, tokens.order] for each in zip(*parts, strict=True))
    return keys, values


def _pair(path: Path, prefix: str, count: int) -> tuple[Tensor, Tensor] | None:
    """Keys and values of so many tokens in a file, if it has such."""
    for found in read_where_present([path], [f"{prefix}k", f"{prefix}v"]):
        keys, values = found.values()
        if any(tensor.dim() != 3 or tensor.shape[1] != count for tensor in (keys, values)) or len(keys) != len(values):
            raise ValueError(f"{path.name} has keys and values of {[list(each.shape) for each in (keys, values)]}")
        return keys, values
    return None
