"""The stores of a layer of which some may be compressed: what is kept lies in tiers, once it was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall, PartElsewhere
from megakv.attention.partial import KVPart, Part
from megakv.base.tensor_files import StreamedTensor
from megakv.cache.dense import DenseStore
from megakv.cache.ragged import RaggedStore, Rotate
from megakv.cache.ragged_attention import AttendedBody, RaggedPart
from megakv.cache.ragged_body import Body, RaggedBody
from megakv.cache.saved import SavedLayer
from megakv.cache.store import KVStore, Pair
from megakv.distributed.sharding import IntArray, TokenBlock
from megakv.offload.bodies import TieredBody
from megakv.offload.shared_tiers import SharedTiers
from megakv.offload.store import Strip, TieredStore


class TurnStore(KVStore):
    """Rows in a `tier`, but for those of a turn that may be compressed: on the accelerator until it ends.

    What is not compressed then follows the others into the tier.
    """

    def __init__(self, tier: TieredStore, turn: DenseStore):
        self.tier, self._turn = tier, turn
        self._open = self._ends = False

    def begin(self, *, complete: bool, turn: bool = False, ends: bool = True) -> None:
        # What came before the last piece of a turn stays before it, also if no row proves long enough.
        self._open, self._ends = turn or any(map(self._turn.rows, self.tier.sequences)), ends

    @property
    def strips(self) -> list[Strip]:
        """Those of the tier."""
        return self.tier.strips

    def set_format(self, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Take the format of keys and values, of which there may be none."""
        self.tier.set_format(k_KSD, v_KSD)

    def append(self, sequence: int | Sequence[int], k_KSD: Tensor, v_KSD: Tensor) -> None:
        if self._open:
            self.tier.expect(k_KSD, v_KSD)
        (self._turn if self._open else self.tier).append(sequence, k_KSD, v_KSD)

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        if self._open:
            self.tier.expect(k_KSD, v_KSD)
        return (self._turn if self._open else self.tier).reserve(sequence, rows, k_KSD, v_KSD)

    def runs(self, sequence: int) -> Sequence[Pair]:
        """Rows of the turn, where it is open."""
        return (self._turn if self._turn.rows(sequence) else self.tier).runs(sequence)

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        # In one piece: they may travel.
        stores = (self.tier, self._turn)
        found = [store.part(sequence) for store in stores if store.rows(sequence) > store.gone(sequence)]
        if not found:
            return
        keys, values = found[0] if len(found) == 1 else (torch.cat(each, dim=1) for each in zip(*found, strict=True))
        here = slice(len(slots) - keys.shape[1], None)
        yield KVPart(sequence, keys, values, slots[here], positions[here])

    def pieces(self, sequence: int) -> Iterator[tuple[int, Tensor, Tensor, IntArray]]:
        """What lies in the tier, and then the turn's, while that goes on."""
        before = self.tier.rows(sequence)
        if before > self.tier.gone(sequence):
            yield from self.tier.pieces(sequence)
        if self._turn.rows(sequence):
            for head, keys, values, rows in self._turn.pieces(sequence):
                yield head, keys, values, before + rows

    def packed(self) -> tuple[Tensor, Tensor, list[int], list[int]] | None:
        return None if self._open else self.tier.packed()

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> PartElsewhere | None:
        return self.tier.attend_elsewhere(call, q_HLD, tokens)

    def finish(self) -> None:
        self.tier.finish()
        for sequence in self.tier.sequences if self._open and self._ends else ():
            if self._turn.rows(sequence):
                self.tier.append(sequence, *self._turn.part(sequence))
                self.tier.flush()
                self._turn.crop(sequence, 0)

    def forget(self, sequence: int, rows: int) -> None:
        before = self.tier.rows(sequence)
        self.tier.forget(sequence, min(rows, before))
        if rows > before:
            self._turn.forget(sequence, rows - before)

    def crop(self, sequence: int, length: int) -> None:
        self._turn.crop(sequence, max(0, length - self.tier.rows(sequence)))
        self.tier.crop(sequence, length)

    def reorder(self, index: list[int]) -> None:
        self._turn.reorder(index)
        self.tier.reorder(index)

    def fork(self) -> TurnStore:
        return TurnStore(self.tier.fork(), self._turn.fork())

    def save(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        return self.tier.save(sequence, slots)

    def load(self, sequence: int, saved: SavedLayer) -> None:
        self.tier.load(sequence, saved)

    def rows(self, sequence: int) -> int:
        return self.tier.rows(sequence) + self._turn.rows(sequence)

    def kept(self, sequence: int) -> IntArray:
        rows = self.rows(sequence) - self.tier.gone(sequence) - self._turn.gone(sequence)
        return np.full(self.tier.head_shape.heads if rows else 0, rows, dtype=np.int64)

    def nbytes(self) -> int:
        return self.tier.nbytes() + self._turn.nbytes()


class CompressedStore(RaggedStore):
    """What compression keeps of a turn goes into the tiers, and all other rows into those of an inner store."""

    _inner: TurnStore | SharedTiers

    def __init__(self, batch: int, inner: TurnStore | SharedTiers, rotate: Rotate | None = None):
        super().__init__(batch, inner, rotate)
        self.tier = inner.tier

    @property
    def strips(self) -> list[Strip]:
        """Those of all other rows."""
        return self._inner.strips

    def set_format(self, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Take the format of keys and values, of which there may be none."""
        self._inner.set_format(k_KSD, v_KSD)

    def _keep(self, body: Body) -> TieredBody:
        if isinstance(body, TieredBody):
            return body
        body = body.here()
        # Of no tokens.
        self.set_format(*(each[:0].expand(len(body.counts), 0, -1) for each in (body.k_nD, body.v_nD)))
        return TieredBody(body, self.tier.layer, self.tier.engine, self.tier.body_quantiser)

    def _here(self, body: Body) -> RaggedBody | None:
        return None if self.tier.leaves(body) else self.tier.brought(body) or body.here()

    def left(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[RaggedPart]:
        """What the host attends to where it lies."""

        def on_host(body: Body) -> AttendedBody | None:
            return body.on_host() if isinstance(body, TieredBody) and self.tier.leaves(body) else None

        return self._kept_parts(sequence, slots, positions, on_host)
