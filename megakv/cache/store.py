"""Where the keys and values of one layer lie on this rank: what every store does, in the order of its life.

A cache makes a store for each layer at its first use, for a batch of sequences. Then, pass by pass:

- `begin` tells it that a pass begins. Most stores need not know.
- `append` takes the new keys and values of a sequence, or one row of each of several.
- Attention reads `parts`, all that is held of a sequence; `runs` are its dense keys and values where they lie. Whatever
  else it asks of a store is in `megakv.attention.method.Store`: only some kinds have an answer.
- `finish` says that the pass has attended: what was read may be moved or freed.
- `pieces` are what each head holds then.

Between passes `forget` frees what a sliding window has left behind, and `crop`, `reorder` and `fork` follow the
conversation. `save` says what a session's file holds of a sequence, and an empty store takes it back with `load`, on
any number of ranks. `rows`, `kept` and `nbytes` count.

A token is named by its row: its index among all tokens of the sequence that this rank was ever given. Which slots and
positions rows have is in the cache's table. Stores compose by these verbs alone. What a kind of them adds, and who asks
for it, is said at the top of its file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from megakv.attention.method import Store
from megakv.attention.partial import KVPart, Part
from megakv.base.tensor_files import StreamedTensor
from megakv.distributed.sharding import IntArray

if TYPE_CHECKING:
    from megakv.cache.saved import SavedLayer

Pair = tuple[Tensor, Tensor]
"""Keys ``[K, n, D]`` and values ``[K, n, Dv]``."""


def cut(runs: Sequence[Pair], first: int, last: int | None = None) -> tuple[Pair, ...]:
    """Rows ``[first, last)`` of those that lie in several runs, behind one another."""
    found: list[Pair] = []
    for keys, values in runs:
        rows = keys.shape[1]
        here = slice(max(0, first), rows if last is None else max(0, min(rows, last)))
        if here.start < here.stop:
            whole = here.stop - here.start == rows
            found.append((keys, values) if whole else (keys[:, here], values[:, here]))
        first -= rows
        last = None if last is None else last - rows
    return tuple(found)


def saved_runs(runs: Sequence[Pair]) -> Iterator[tuple[str, StreamedTensor]]:
    """Tensors of a file by name: keys and values, if there are any, whose rows lie in several runs."""
    return zip("kv", map(StreamedTensor.joined, zip(*runs, strict=True)), strict=False)


class KVStore(Store, ABC):
    """One layer's keys and values on this rank, by sequence. The defaults are for tokens that all heads hold alike."""

    def begin(self, *, complete: bool, turn: bool = False, ends: bool = True) -> None:  # noqa: B027
        """A pass begins.

        Parameters
        ----------
        complete : bool
            Whether nothing was cached before: it attends to whole heads on every rank that has them.
        turn, ends : bool
            Whether the pass belongs to a turn that may be compressed, and whether that ends with it.
        """

    def append(self, sequence: int | Sequence[int], k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Add rows behind the present ones of a sequence, or one row behind those of each of several in their order."""
        if isinstance(sequence, Sequence):
            for row, each in enumerate(sequence):
                self.append(each, k_KSD[:, row : row + 1], v_KSD[:, row : row + 1])
            return
        for place, rows in zip(self.reserve(sequence, k_KSD.shape[1], k_KSD, v_KSD), (k_KSD, v_KSD), strict=True):
            place[:] = rows

    @abstractmethod
    def runs(self, sequence: int) -> Sequence[Pair]:
        """Keys and values in ascending slot order where they lie: what lies contiguously, in order; nothing of a
        sequence without rows. Of all rows or the last ones: the rest is compressed or gone, or attended to elsewhere.
        """

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        """All that is held of a sequence, given the coordinates of every row."""
        runs = self.runs(sequence)
        first = len(slots) - sum(keys.shape[1] for keys, _ in runs)
        for keys, values in runs:
            here = slice(first, first + keys.shape[1])
            yield KVPart(sequence, keys, values, slots[here], positions[here])
            first = here.stop

    def pieces(self, sequence: int) -> Iterator[tuple[int, Tensor, Tensor, IntArray]]:
        """Between passes, what each head holds of a sequence: the head, keys ``[n, D]``, values ``[n, Dv]`` and rows
        ``[n]``, ascending; in one piece or several.
        """
        runs = self.runs(sequence)
        first = self.rows(sequence) - sum(keys.shape[1] for keys, _ in runs)
        for head in range(len(runs[0][0]) if runs else 0):
            start = first
            for keys, values in runs:
                rows = np.arange(start, start + keys.shape[1])
                yield head, keys[head], values[head], rows
                start += len(rows)

    def finish(self) -> None:  # noqa: B027
        """The pass has attended: what was read of the store is not read any more."""

    def forget(self, sequence: int, rows: int) -> None:  # noqa: B027  Who keeps them all is right, too.
        """The first rows of a sequence are not asked for again, and need no memory; in an empty store: never come."""

    @abstractmethod
    def crop(self, sequence: int, length: int) -> None:
        """Cut a sequence back to its first rows, as if no others had ever come, in a pass that failed or before."""

    @abstractmethod
    def reorder(self, index: list[int]) -> None:
        """Sequence b becomes the present sequence ``index[b]``."""

    @abstractmethod
    def fork(self) -> KVStore:
        """A store with the same rows; what is appended to one is not seen by the other."""

    def save(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """Tensors of a file by name, given the slots of every row. They are read when the file is written."""
        return dict(saved_runs(self.runs(sequence)))

    def load(self, sequence: int, saved: SavedLayer) -> None:
        """Take what `save` gave on all ranks; a ValueError or IndexError where it does not fit together."""
        absent = saved.tokens.absent
        self.forget(sequence, absent)
        if len(saved.tokens.slots) > absent:
            self.append(sequence, *saved.rows())

    @abstractmethod
    def rows(self, sequence: int) -> int:
        """Rows of a sequence, compressed and forgotten ones included."""

    def kept(self, sequence: int) -> IntArray:
        """``[K]`` tokens that each head holds of a sequence; empty where nothing is held."""
        runs = self.runs(sequence)
        return np.full(len(runs[0][0]) if runs else 0, sum(keys.shape[1] for keys, _ in runs), dtype=np.int64)

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held."""


class TurnStore(KVStore):
    """A store of rows that may be compressed when their turn ends: a `RaggedStore` can be around it."""

    @abstractmethod
    def part(self, sequence: int) -> Pair:
        """Keys and values in one piece: all rows, or those of the turn alone."""

    def release(self, sequence: int, rows: int) -> None:
        """Free the last rows of a sequence, in the pass that has compressed them."""
        self.crop(sequence, self.rows(sequence) - rows)


class SpanStore(TurnStore):
    """A store whose rows are all there, and all heads' alike: `ShardedCache.span` takes some out, or puts them in."""

    @abstractmethod
    def share(self, sequence: int, first: int, last: int) -> Sequence[Pair]:
        """The runs of some rows, none of which is gone, in memory that nobody writes again."""

    @abstractmethod
    def append_shared(self, sequence: int, runs: Sequence[Pair]) -> None:
        """Add rows that lie in such memory; a ValueError where they are of another kind than those before."""

    def preallocate(self, sequence: int, rows: int) -> None:  # noqa: B027
        """So many rows of a sequence will be there in all: memory may be taken for all of them at once."""
