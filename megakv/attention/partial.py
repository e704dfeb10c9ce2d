"""Partial attention: sequences' local queries against their keys, part by part, in any order.

The exact results of context parallelism rest on this: each part gives an output and a log-sum-exp, and the merge of all
parts is the attention over all keys (Context Parallelism, Section 3.2). What a query may see is decided from global
slots, never from the order in which parts arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megakv.attention.backends import attend_block
from megakv.attention.compiled import DecodeKernel, Run
from megakv.attention.latent import EXPANDED_ROWS
from megakv.attention.merge import merge_
from megakv.attention.reference import Alibi, Scoring
from megakv.attention.visibility import Block, Slots, Visibility, plan_blocks, sees_all
from megakv.base.device import upload
from megakv.distributed.sharding import IntArray, TokenBlock


class PartialAttention:
    """Running output and log-sum-exp of one sequence's local queries ``[H, L, D]``, after rotary, at ascending slots.

    Queries may have any strides (a transposed view of ``[L, H, D]`` is not copied), and L may be 0. `out` is ``[H, L,
    Dv]`` and `lse` ``[H, L]``, float32 (float64 for float64 queries): 0 and -inf where no key was seen; `out` may be
    another tensor after `add`, of any strides. `value_dim`, the queries' if None, is only asked for before the first
    part.
    """

    def __init__(self, q_HLD: Tensor, q_slots: Slots, scoring: Scoring, value_dim: int | None = None) -> None:
        assert q_HLD.shape[1] == len(q_slots), f"{q_HLD.shape[1]} query rows with {len(q_slots)} slots"
        self.scoring = scoring
        self.q_HLD = q_HLD
        self.q_slots = q_slots
        self.value_dim = q_HLD.shape[-1] if value_dim is None else value_dim
        self._state: tuple[Tensor, Tensor] | None = None
        # Rows that some block was stored in: the first block of a row needs no merge.
        self._seen = np.zeros(len(q_slots), dtype=bool)

    @property
    def out(self) -> Tensor:
        return self._accumulators()[0]

    @property
    def lse(self) -> Tensor:
        return self._accumulators()[1]

    @property
    def result(self) -> tuple[Tensor, Tensor]:
        """Both, but `out` in the type of its kernel where nothing was merged: as exact, and written once."""
        return self._accumulators() if self._state is None else self._state

    def add(self, k_KSD: Tensor, v_KSD: Tensor, k_slots: Slots, k_positions: Slots | None = None) -> None:
        """Attend to the visible ones of these keys and merge the result.

        ``[K, S, D]`` keys and ``[K, S, Dv]`` values, or latents and values without columns, are in the queries' dtype,
        K a divisor of H; any strides with a last one of 1 are read without a copy; S may be 0. No key may be in two
        parts. Slots ascend; positions, for ALiBi, are the slots if None.
        """
        assert k_KSD.shape[1] == v_KSD.shape[1] == len(k_slots), f"{k_KSD.shape[1]} keys with {len(k_slots)} slots"
        positions = k_slots if k_positions is None else k_positions
        latent = self.scoring.latent
        if latent is None:
            self._add_rows(k_KSD, self.scoring.values(k_KSD, v_KSD), k_slots, positions)
            return
        for first in range(0, len(k_slots), EXPANDED_ROWS):
            rows = slice(first, first + EXPANDED_ROWS)
            self._add_rows(*latent.expand(k_KSD[:, rows]), k_slots[rows], positions[rows])

    def merge(self, out_HLD: Tensor, lse_HL: Tensor) -> None:
        """Merge the attention of all rows over further keys, computed elsewhere: ``[H, L, Dv]`` and ``[H, L]``.

        It is 0 and -inf where no key was seen, and may be overwritten later.
        """
        self._merge_rows(0, len(self.q_slots), out_HLD, lse_HL)

    def _add_rows(self, k_KSD: Tensor, v_KSD: Tensor, k_slots: Slots, k_positions: Slots) -> None:
        for block in plan_blocks(self.q_slots, k_slots, self.scoring.window):
            self._add_block(block, k_KSD, v_KSD, k_slots, k_positions)

    def _add_block(self, block: Block, k_KSD: Tensor, v_KSD: Tensor, k_slots: Slots, k_positions: Slots) -> None:
        self._merge_rows(block.q0, block.q1, *self._attend_block(block, k_KSD, v_KSD, k_slots, k_positions))

    def _attend_block(
        self, block: Block, k_KSD: Tensor, v_KSD: Tensor, k_slots: Slots, k_positions: Slots
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the block's rows over its keys."""
        q0, q1, k0, k1, kind = block
        device = self.q_HLD.device
        visible = None
        if kind == "masked":
            visible = Visibility(self.q_slots[q0:q1], k_slots[k0:k1], self.scoring.window)
        alibi = None
        if self.scoring.alibi_slopes is not None:
            q_slots, positions = upload(self.q_slots[q0:q1], device), upload(k_positions[k0:k1], device)
            alibi = Alibi(self.scoring.alibi_slopes, q_slots, positions)
        return attend_block(
            self.q_HLD[:, q0:q1],
            k_KSD[:, k0:k1],
            v_KSD[:, k0:k1],
            self.scoring.scale,
            causal=kind == "causal",
            visible=visible,
            softcap=self.scoring.softcap,
            alibi=alibi,
        )

    def _merge_rows(self, q0: int, q1: int, out: Tensor, lse: Tensor) -> None:
        if self._state is None:
            self.value_dim = out.shape[-1]
            if q1 - q0 == len(self.q_slots):
                self._state = out, lse
                self._seen[:] = True
                return
        all_out, all_lse = self._accumulators()
        if self._seen[q0:q1].any():
            merge_(all_out[:, q0:q1], all_lse[:, q0:q1], out, lse)
        else:
            all_out[:, q0:q1] = out
            all_lse[:, q0:q1] = lse
        self._seen[q0:q1] = True

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.q_HLD.dtype, torch.float32)

    def _accumulators(self) -> tuple[Tensor, Tensor]:
        if self._state is None:
            heads, rows, _ = self.q_HLD.shape
            # The kernels' memory order, so that the merge walks both sides alike and [L, H * Dv] needs no copy.
            out = self.q_HLD.new_zeros(rows, heads, self.value_dim, dtype=self._dtype)
            lse = self.q_HLD.new_full((rows, heads), -torch.inf, dtype=self._dtype)
            self._state = out.transpose(0, 1), lse.t()
        elif self._state[0].dtype != self._dtype:
            self._state = self._state[0].to(self._dtype), self._state[1]
        return self._state


class Part(Protocol):
    """Some of a sequence's cached keys and values, however they are held."""

    @property
    def sequence(self) -> int:
        """Batch row."""

    def add_to(self, partial: PartialAttention) -> None:
        """Attend to them and merge the result."""

    def runs(self, q_HLD: Tensor, slot: int, scoring: Scoring) -> IntArray | None:
        """``[1, 9]`` the `Run` where they lie, or ``[K, 9]`` one for each KV head, for a compiled kernel that attends
        from one query row at a slot; None where it does not read or does not see some of them.
        """


class KVPart(NamedTuple):
    """Keys and values of one sequence on one rank, with the coordinates that causality is decided from.

    ``[K, S, D]`` keys, ``[K, S, Dv]`` values and ``[S]`` slots, which ascend, and positions.
    """

    sequence: int
    k_KSD: Tensor
    v_KSD: Tensor
    slots: IntArray
    positions: IntArray

    def add_to(self, partial: PartialAttention) -> None:
        """See `Part`."""
        partial.add(self.k_KSD, self.v_KSD, self.slots, self.positions)

    def runs(self, q_HLD: Tensor, slot: int, scoring: Scoring) -> IntArray | None:
        """See `Part`."""
        values, count = scoring.values(self.k_KSD, self.v_KSD), len(self.slots)
        seen = not count or sees_all(slot, self.slots, 0, count, scoring.window)
        if not seen or not DecodeKernel.reads(q_HLD, self.k_KSD, values):
            return None
        return np.array([Run.of(self.k_KSD, values)], dtype=np.int64)

    def since(self, slot: int) -> KVPart:
        """Its rows from a slot on."""
        rows = int(np.searchsorted(self.slots, slot))
        if not rows:
            return self
        keys, values = self.k_KSD[:, rows:], self.v_KSD[:, rows:]
        return KVPart(self.sequence, keys, values, self.slots[rows:], self.positions[rows:])


def dense(parts: Iterable[Part]) -> list[KVPart]:
    """Parts that can be sent to other ranks, which only dense ones are made for."""
    found = []
    for part in parts:
        assert isinstance(part, KVPart), "compressed keys and values do not travel"
        found.append(part)
    return found


class PackedAttention:
    """Running partial attention of packed queries of several sequences, each by a `partial_type`."""

    def __init__(
        self,
        q_HLD: Tensor,
        tokens: TokenBlock,
        scoring: Scoring,
        value_dim: int,
        partial_type: type[PartialAttention] = PartialAttention,
    ):
        self._shape = (q_HLD.shape[0], q_HLD.shape[1], value_dim)
        self._dtype = torch.float64 if q_HLD.dtype == torch.float64 else torch.float32
        self._device = q_HLD.device
        self._runs: dict[int, tuple[slice, PartialAttention]] = {}
        for sequence in range(tokens.batch):
            run = tokens.run(sequence)
            if run.stop > run.start:
                partial = partial_type(q_HLD[:, run], tokens.slot[run], scoring, value_dim)
                self._runs[sequence] = (run, partial)

    def add(self, part: Part) -> None:
        """Attend to one part and merge."""
        if part.sequence in self._runs:
            part.add_to(self._runs[part.sequence][1])

    def merge(self, out_HLD: Tensor, lse_HL: Tensor) -> None:
        """Merge the attention of all rows to further keys, computed elsewhere: ``[H, L, Dv]`` and ``[H, L]``."""
        for run, partial in self._runs.values():
            partial.merge(out_HLD[:, run], lse_HL[:, run])

    def result(self) -> tuple[Tensor, Tensor]:
        """``[H, L, Dv]`` outputs and ``[H, L]`` log-sum-exps so far; see `PartialAttention.result`."""
        if len(self._runs) == 1:
            run, partial = next(iter(self._runs.values()))
            if run.stop - run.start == self._shape[1]:
                return partial.result
        out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        lse = torch.full(self._shape[:2], float("-inf"), dtype=self._dtype, device=self._device)
        for run, partial in self._runs.values():
            out[:, run], lse[:, run] = partial.result
        return out, lse
