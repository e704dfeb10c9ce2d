"""What a distributed attention method is given, and what it must return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from megakv.attention.compiled import RowTable
from megakv.attention.partial import KVPart, PackedAttention, Part, dense
from megakv.attention.prompts import attend_prompts
from megakv.attention.reference import Scoring
from megakv.attention.together import PackedRows, attend_rows, attend_together
from megakv.distributed.sharding import IntArray, Layout, TokenBlock, TokenTable


class Transfer(Protocol):
    """Sends and receives under way that end together: until `wait` returns, leave their buffers alone."""

    def count_from_now(self) -> None: ...
    def wait(self) -> None: ...


class Ring(Protocol):
    """What methods use of a `megakv.distributed.comm.Communicator`; destinations are context-parallel ranks.

    Buffers are contiguous, and as large as the other rank's. `operation` is a name of your own: reports count under it.
    """

    @property
    def mesh(self) -> Any:
        """Where a rank is in its ring or chain: `cp_rank`, `cp_size`."""

    @property
    def ledger(self) -> Any:
        """Counts what ranks compute: ``with ledger.compute(name, layer)``."""

    def shift(
        self, send: Tensor, receive: Tensor, *, operation: str, layer: int | None, steps: tuple[int, int] = (1, -1)
    ) -> Transfer:
        """Send to the next rank around the ring, receive from the previous one; by ``(-1, 1)`` the other way."""

    def send(self, buffer: Tensor, destination: int, *, operation: str, layer: int | None) -> Transfer:
        """Send to rank `rank` - 1 or + 1, which posts a receive: not from the last rank to the first."""

    def post_receive(self, buffer: Tensor, source: int, *, operation: str, layer: int | None) -> Transfer: ...
    def all_gather(self, tensor: Tensor, *, operation: str, layer: int | None, receive: Tensor | None = None) -> Tensor:
        """``[N, ...]`` of all N ranks, whose tensors have one shape."""

    def cp_all_to_all(
        self, send: Tensor, send_counts: list[int], receive_counts: list[int], *, operation: str, layer: int | None
    ) -> Tensor: ...


class PartElsewhere(Protocol):
    """Attention to some rows where they lie, under way."""

    def merge_into(self, out_HLD: Tensor, lse_HL: Tensor) -> None:
        """Merge it into the attention to all other rows, in place."""


class Store(ABC):
    """What attention asks of this rank's keys and values of a layer, a `megakv.cache.store.KVStore`, and what those
    answer that lie on the device and have no short cuts."""

    @abstractmethod
    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        """All that is held of a sequence, given the coordinates of every row."""

    @abstractmethod
    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> tuple[Tensor, Tensor]:
        """Places of new rows for the caller to write, which count as present at once.

        Heads, head dims, type and device are those of `k_KSD` and `v_KSD`, whose elements are not read.
        """

    def in_place(self, new: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> RowTable | None:
        """A `RowTable` of where all rows of every sequence lie, in place of all other verbs of a pass of few tokens.
        Behind the last ones of sequence b is room for ``new[b]`` more, of such a kind, which count as present at once.

        None, with nothing changed, where they are not in this memory alone, on all ranks alike.
        """
        return None

    in_hand = False
    """Whether it holds all rows that come, as they come: where none was there, those of a pass are all there are."""

    def hold_alike(self, sequences: int, k_KLD: Tensor, v_KLD: Tensor) -> bool:
        """Hold prompts of so many sequences, of as many rows each, in one copy; False, with nothing done, where a store
        has rows already or does not know how.
        """
        return False

    def packed(self) -> tuple[Tensor, Tensor, list[int], list[int]] | None:
        """A buffer's keys ``[K, R, D]`` and values ``[K, R, Dv]``, each sequence's first row in it, and its rows.

        None where the rows of all sequences do not lie in one buffer.
        """
        return None

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> PartElsewhere | None:
        """Begin to attend from some rank's queries to rows that are in none of the parts; None where there are none."""
        return None

    def attend_together(
        self, q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, parts: Sequence[Part]
    ) -> tuple[Tensor, Tensor, list[Part]] | None:
        """One row of each sequence over its parts, in few kernel calls: ``[H, L, Dv]``, ``[H, L]``, and the parts that
        are left; None where each sequence is to be attended to by itself.
        """
        return None


@dataclass(eq=False)
class AttentionCall:
    """One layer's attention over all context-parallel ranks.

    The new keys and values are in the store already, but for a layout that is gathered on the last rank: there the
    method puts them into its store.
    """

    layer: int
    q_HLD: Tensor
    """Queries of this rank's tokens, packed; with `narrowed`, of those alone that are wanted."""
    k_KLD: Tensor
    v_KLD: Tensor
    layout: Layout
    """The new tokens on every rank."""
    scoring: Scoring
    kv_heads: int
    """K: the same on every rank of the ring, as is `key_dim`."""
    key_dim: int
    value_dim: int
    """Dv, columns of a head's output: those of values, but for latents."""
    store: Store
    """This rank's keys and values of the layer."""
    table: TokenTable
    """The cached tokens on every rank, new ones included."""
    comm: Ring
    compressed: bool = False
    """Whether some of what was cached before was compressed, on whichever rank: that does not travel."""
    narrowed: bool = False
    """Whether the layer is the last one, and `Layout.wanted` says whose results it is asked for.

    `queries` and `tokens` are those of `q_HLD` either way.
    """
    in_hand: bool = False
    """Whether, where nothing was cached, `k_KLD` and `v_KLD` are all that there is to attend to."""
    once: Callable[[Any, Callable[[], Any]], Any] = lambda key, make: make()
    """What all layers of the pass share, by key: made by the first one that asks."""
    _parts: list[Part] | None = field(default=None, init=False)

    @property
    def rank(self) -> int:
        """This rank's context-parallel index."""
        return self.comm.mesh.cp_rank

    @property
    def size(self) -> int:
        """Context-parallel degree."""
        return self.comm.mesh.cp_size

    @property
    def queries(self) -> tuple[TokenBlock, ...]:
        """Per rank, the tokens of its queries."""
        return self.layout.queries if self.narrowed else self.layout.tokens

    @property
    def tokens(self) -> TokenBlock:
        """The tokens of this rank's queries."""
        return self.queries[self.rank]

    @property
    def held(self) -> tuple[TokenBlock, ...]:
        """Per rank, the tokens whose keys and values it holds, new ones included; without those that no query sees."""
        seen = self.first_seen
        return self.table.tokens() if seen is None else self.table.tokens_since(seen)

    @property
    def first_seen(self) -> IntArray | None:
        """``[B]`` the first slot of each sequence that the window of some query reaches; None without a window."""
        window = self.scoring.window
        return None if window is None else self.layout.first_slots - window + 1

    @property
    def parts(self) -> list[Part]:
        """This rank's keys and values of all sequences that have any, looked at when they are first asked for.

        Of dense ones, those of `held`.
        """
        if self._parts is not None:
            return self._parts
        found: list[Part] = []
        seen = self.first_seen
        for sequence in range(self.table.batch):
            slots, positions = self.table.coordinates(self.rank, sequence)
            if len(slots):
                parts = self.store.parts(sequence, slots, positions)
                found += parts if seen is None else _within(parts, int(seen[sequence]))
        self._parts = found
        return found

    def packed(self) -> PackedRows | None:
        """All of them where they lie in one buffer; None where they do not."""
        buffer = self.store.packed()
        if buffer is None:
            return None
        keys, values, first, count = buffer
        slots = [self.table.slots(self.rank, sequence) for sequence in range(self.table.batch)]
        return PackedRows(keys, self.scoring.values(keys, values), first, count, slots)

    def dense_parts(self) -> list[KVPart]:
        """The same for methods that send keys and values to other ranks: compressed ones do not travel."""
        return dense(self.parts)

    def new_parts(self, start: int = 0, stop: int | None = None) -> Iterator[KVPart]:
        """Keys and values that this rank computed in rows ``[start, stop)`` of the pass, a part per sequence."""
        tokens = self.layout.tokens[self.rank]
        for sequence in range(tokens.batch):
            run = tokens.run(sequence)
            rows = slice(max(run.start, start), run.stop if stop is None else min(run.stop, stop))
            if rows.start < rows.stop:
                keys, values = self.k_KLD[:, rows], self.v_KLD[:, rows]
                yield KVPart(sequence, keys, values, tokens.slot[rows], tokens.position[rows])

    def cached_tokens(self) -> tuple[TokenBlock, ...]:
        """Per rank, the tokens that it held before the pass."""
        return tuple(
            held.without_last(np.diff(new.bounds)) for held, new in zip(self.held, self.layout.stored, strict=True)
        )

    def cached_parts(self) -> Iterator[Part]:
        """What this rank held before the pass. The store must hold the new tokens, or places for them."""
        for part in self.parts:
            if isinstance(part, KVPart):
                # New rows come last, and are dense: compression follows attention.
                rows = slice(0, int(np.searchsorted(part.slots, self.layout.first_slots[part.sequence])))
                if rows.stop:
                    keys, values = part.k_KSD[:, rows], part.v_KSD[:, rows]
                    yield KVPart(part.sequence, keys, values, part.slots[rows], part.positions[rows])
            else:
                yield part


AttentionMethod = Callable[[AttentionCall], tuple[Tensor, Tensor]]
"""A way to compute exact attention over tokens that are spread over ranks.

It returns ``[H, L, Dv]`` outputs, float32 (or float64, or in the kernel's type where nothing is merged), and the
log-sum-exp ``[H, L]`` of this rank's queries. An engine makes one instance, which all layers and passes call.
"""


def _within(parts: Iterable[Part], first: int) -> Iterator[Part]:
    """Parts without the dense rows before a slot."""
    for part in parts:
        since = part.since(first) if isinstance(part, KVPart) else part
        if not isinstance(since, KVPart) or len(since.slots):
            yield since


def attend_here(
    call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock, parts: Sequence[Part] | None = None
) -> tuple[Tensor, Tensor]:
    """``[H, L, Dv]`` and ``[H, L]`` of some rank's queries over this rank's keys and values, wherever these lie.

    `parts`, all of the call's if None, are looked at after the rest has begun elsewhere.
    """
    elsewhere = call.store.attend_elsewhere(call, q_HLD, tokens)
    if elsewhere is None and parts is None and (found := attend_prompts(call, q_HLD, tokens)) is not None:
        return found
    out, lse = _together(call, q_HLD, tokens, parts) or attend_rows(
        q_HLD, tokens, call.scoring, call.kv_heads, call.value_dim, call.parts if parts is None else parts
    )
    if elsewhere is not None:
        out = out.to(lse.dtype)
        elsewhere.merge_into(out, lse)
    return out, lse


def _together(
    call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock, parts: Sequence[Part] | None
) -> tuple[Tensor, Tensor] | None:
    """One row of each sequence on CUDA, by kernels for several sequences; None where there is nothing for them."""
    if q_HLD.device.type == "cpu" or not tokens.single:
        return None
    if parts is None and (packed := call.packed()) is not None:
        return attend_together(q_HLD, tokens, call.scoring, packed)
    parts = call.parts if parts is None else parts
    if (some := call.store.attend_together(q_HLD, tokens, call.scoring, parts)) is None:
        return None
    out, lse, rest = some
    if not rest:
        return out, lse
    attention = PackedAttention(q_HLD, tokens, call.scoring, call.value_dim)
    for part in rest:
        attention.add(part)
    attention.merge(out, lse)
    return attention.result()
