"""Where the keys and values of one layer lie on this rank: what every store does, in the order of its life.

A cache makes a store for each layer at its first use, for a batch of sequences. Then, pass by pass:

- `begin` tells it that a pass begins. Most stores need not know.
- `append` takes the new keys and values of a sequence; `append_each` takes one row of each of several; `reserve` gives
  the caller places behind the present rows to write to.
- A step of decoding may have both in one: `in_place` says where all rows lie, and where the next ones go.
- Attention reads: `parts` are all that is held of a sequence; `runs` its dense keys and values where they lie, `part`
  in one piece; `packed` those of all sequences, where they lie in one buffer. `attend_elsewhere` begins attention to
  rows where they lie.
- `compress` keeps of a sequence's latest tokens only some in each head.
- `finish` says that the pass has attended: what was read may be moved or freed.
- `pieces` are what each head holds then, and `replace` puts some of it in the place of everything.

Between passes `forget` frees what a sliding window has left behind, and `crop`, `reorder` and `fork` follow the
conversation. `save` says what a session's file holds of a
sequence, and an empty store takes it back with `load`, on any number of ranks. `rows`, `kept` and `nbytes` count.

A token is named by its row: its index among all tokens of the sequence that this rank was ever given. Which slots and
positions rows have is in the cache's table. Stores compose by these verbs alone, and nobody asks which kind one is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from megakv.attention.partial import KVPart, Part
from megakv.base.errors import MegaKVError
from megakv.base.tensor_files import StreamedTensor
from megakv.distributed.sharding import IntArray

if TYPE_CHECKING:
    from megakv.attention.compiled import RowTable
    from megakv.attention.method import AttentionCall, PartElsewhere
    from megakv.attention.reference import Scoring
    from megakv.cache.saved import SavedLayer
    from megakv.distributed.sharding import TokenBlock

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


class Move(NamedTuple):
    """Tokens before the row `before`, all at slots before `slot`, count as if they stood `shift` positions further on,
    where what lay between them and the others is gone.
    """

    shift: int
    before: int
    slot: int


class KVStore(ABC):
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

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Add rows behind the present ones of a sequence."""
        for place, rows in zip(self.reserve(sequence, k_KSD.shape[1], k_KSD, v_KSD), (k_KSD, v_KSD), strict=True):
            place[:] = rows

    def append_each(self, sequences: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> None:
        """Add one row behind the present ones of each of some sequences, in their order."""
        for index, sequence in enumerate(sequences):
            self.append(sequence, k_KLD[:, index : index + 1], v_KLD[:, index : index + 1])

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        """Places of new rows for the caller to write, which count as present at once.

        Heads, head dims, type and device are those of `k_KSD` and `v_KSD`, whose elements are not read.
        """
        raise MegaKVError("this layer's keys and values cannot be written in place")

    def in_place(self, new: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> RowTable | None:
        """Where all rows of every sequence lie, in place of all other verbs of a pass of few tokens. Behind the last
        ones of sequence b is room for ``new[b]`` more, of such a kind, which count as present at once.

        None, with nothing changed, where they are not in this memory alone, on all ranks alike.
        """
        return None

    @abstractmethod
    def part(self, sequence: int) -> Pair:
        """Keys and values in ascending slot order, of all rows or the last ones: the rest is compressed or gone, or
        `attend_elsewhere` attends to it.
        """

    def runs(self, sequence: int) -> Sequence[Pair]:
        """The same where it lies: what lies contiguously, in order; nothing of a sequence without rows."""
        return [self.part(sequence)] if self.rows(sequence) > self.gone(sequence) else []

    def share(self, sequence: int, first: int, last: int) -> Sequence[Pair]:
        """The runs of some rows, none of which is gone, in memory that nobody writes again."""
        runs = self.runs(sequence)
        start = self.rows(sequence) - sum(keys.shape[1] for keys, _ in runs)
        return cut(runs, first - start, last - start)

    def append_shared(self, sequence: int, runs: Sequence[Pair]) -> None:
        """Add rows that lie in such memory; a ValueError where they are of another kind than those before."""
        for keys, values in runs:
            self.append(sequence, keys, values)

    def preallocate(self, sequence: int, rows: int) -> None:  # noqa: B027
        """So many rows of a sequence will be there in all: memory may be taken for all of them at once."""

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        """All that is held of a sequence, given the coordinates of every row."""
        runs = self.runs(sequence)
        first = len(slots) - sum(keys.shape[1] for keys, _ in runs)
        for keys, values in runs:
            here = slice(first, first + keys.shape[1])
            yield KVPart(sequence, keys, values, slots[here], positions[here])
            first = here.stop

    def packed(self) -> tuple[Tensor, Tensor, list[int], list[int]] | None:
        """A buffer's keys ``[K, R, D]`` and values ``[K, R, Dv]``, each sequence's first row in it, and its rows.

        None where what `part` gives of all sequences does not lie in one buffer.
        """
        return None

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> PartElsewhere | None:
        """Begin to attend from some rank's queries to rows that `part` does not give; None where it gives all."""
        return None

    def attend_together(
        self, q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, parts: Sequence[Part]
    ) -> tuple[Tensor, Tensor, list[Part]] | None:
        """One row of each sequence over its parts, in few kernel calls: ``[H, L, Dv]``, ``[H, L]``, and the parts that
        are left; None where each sequence is to be attended to by itself.
        """
        return None

    def compress(self, sequence: int, keep_KS: Tensor) -> None:
        """Of a sequence's latest tokens keep what ``[K, n]`` says of the last n, and free the others."""
        raise MegaKVError("this layer's keys and values cannot be compressed")

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

    def replace(
        self, sequence: int, keys: Tensor, values: Tensor, counts: IntArray, rows: IntArray, move: Move | None = None
    ) -> None:
        """Of all rows so far hold these ``[n]`` alone, head after head of ``[K]`` counts, in ``[n, D]`` and so on."""
        raise MegaKVError("this layer's keys and values cannot be compressed")

    def finish(self) -> None:  # noqa: B027
        """The pass has attended: what was read of the store is not read any more."""

    def forget(self, sequence: int, rows: int) -> None:  # noqa: B027  Who keeps them all is right, too.
        """The first rows of a sequence are not asked for again, and need no memory; in an empty store: never come."""

    def gone(self, sequence: int) -> int:
        """How many first rows `part` and `save` leave out because they were forgotten."""
        return 0

    @abstractmethod
    def crop(self, sequence: int, length: int) -> None:
        """Cut a sequence back to its first rows, as if no others had ever come, in a pass that failed or before."""

    def release(self, sequence: int, rows: int) -> None:
        """Free the last rows of a sequence, in the pass that has compressed them."""
        self.crop(sequence, self.rows(sequence) - rows)

    @abstractmethod
    def reorder(self, index: list[int]) -> None:
        """Sequence b becomes the present sequence ``index[b]``."""

    @abstractmethod
    def fork(self) -> KVStore:
        """A store with the same rows; what is appended to one is not seen by the other."""

    def save(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """Tensors of a file by name, given the slots of every row. They are read when the file is written."""
        runs = self.runs(sequence)
        return {name: StreamedTensor.joined(each) for name, each in zip("kv", zip(*runs, strict=True), strict=False)}

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
        return np.full(len(runs[0][0]) if runs else 0, self.rows(sequence) - self.gone(sequence), dtype=np.int64)

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held."""
