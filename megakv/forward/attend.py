"""A layer's attention over all ranks, from its new rows to its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megakv.attention.latent import LatentHeads, expanding_pays
from megakv.attention.merge import add_sinks
from megakv.attention.method import AttentionCall, AttentionMethod
from megakv.attention.methods import METHODS
from megakv.attention.reference import Scoring
from megakv.base.device import upload
from megakv.cache.notes import Notes
from megakv.cache.store import KVStore
from megakv.distributed.comm import Communicator
from megakv.fairkv.compression import Compressor
from megakv.fairkv.eviction import Eviction
from megakv.forward.choice import last_layer_method
from megakv.forward.pass_plan import PassPlan
from megakv.forward.planning import PassPlanner

if TYPE_CHECKING:
    from megakv.fairkv.replicas import HeadReplicas


class PackedQueries:
    """Queries of a layer: without a stand-in row and, in the last layer, of the wanted tokens alone."""

    def __init__(self, plan: PassPlan, q_BHSD: Tensor, *, last: bool):
        self._like, self._rows = q_BHSD, len(plan.tokens)
        self._index: Tensor | None = None
        if last and (wanted := plan.layout.wanted) is not None:
            self._index = plan.once("wanted", lambda: upload(wanted[plan.rank], q_BHSD.device))

    @property
    def narrowed(self) -> bool:
        """Whether tokens of this pass are left out."""
        return self._index is not None

    def taken(self) -> Tensor:
        """``[H, n, D]`` of the tokens that attend."""
        q_HLD = self._like[0]
        if self._index is not None:
            return q_HLD.index_select(1, self._index)
        return q_HLD[:, : self._rows] if self._rows < q_HLD.shape[1] else q_HLD

    def put_back(self, out_HLD: Tensor) -> Tensor:
        """``[1, L, H, Dv]`` of all rows, zero where a token did not attend."""
        length, dtype = self._like.shape[2], self._like.dtype
        out_LHD = out_HLD.transpose(0, 1).to(dtype, memory_format=torch.contiguous_format)
        if self._rows < length or self.narrowed:
            whole_LHD = self._like.new_zeros((length, *out_LHD.shape[1:]))
            whole_LHD[slice(self._rows) if self._index is None else self._index] = out_LHD
            out_LHD = whole_LHD
        return out_LHD[None].contiguous()


@dataclass
class LayerAttention:
    """Attention of one engine's model over its mesh, layer by layer."""

    comm: Communicator
    planner: PassPlanner
    """Decides where the tokens of a pass go and which methods serve it."""
    compressor: Compressor | None = None
    """Compresses the cache after a prompt."""
    replicas: HeadReplicas | None = None
    """KV heads on several tensor-parallel ranks that share their tokens."""
    methods: dict[str, AttentionMethod] = field(default_factory=dict)
    """Those that were used so far, by name."""

    @property
    def eviction(self) -> Eviction | None:
        """Keeps caches within their budgets while decoding, if they are to be."""
        compressor = self.compressor
        return None if compressor is None or compressor.interval is None else Eviction(compressor)

    def attend_layer(
        self,
        plan: PassPlan,
        layer: int,
        q_BHSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        scoring: Scoring,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store the new keys and values, then attend over all ranks.

        ``[1, H, L, D]``, ``[1, K, L, D]`` and ``[1, K, L, Dv]`` are this rank's packed tokens, `sinks` is ``[H]``;
        returned is ``[1, L, H, Dv]`` in the type of `q_BHSD`. Rows beyond those of the layout stand in for an empty
        shard: they are neither stored nor attended from. Neither are, in the last layer, queries of tokens that nothing
        is asked of: their results are zero.
        """
        self.comm.ledger.leave_dense()
        store = plan.cache.store(layer)
        plan.cache.windows[layer] = scoring.window
        if plan.workload is None:
            # As where a piece of a prompt is nothing but padding. Nothing begins, nor ends, in a store.
            store.finish()
            return q_BHSD.new_zeros((1, q_BHSD.shape[2], q_BHSD.shape[1], scoring.value_dim(v_BKSD)))
        k_KLD, v_KLD = self._stored(plan, store, k_BKSD[0], v_BKSD[0])
        queries = PackedQueries(plan, q_BHSD, last=layer == self.planner.traits.last_layer)
        latent = self._absorbing(plan, scoring.latent, narrowed=queries.narrowed)
        q_HLD = queries.taken() if latent is None else latent.absorb(queries.taken())
        scoring = scoring if latent is None else scoring.absorbed()
        call = AttentionCall(
            layer=layer,
            q_HLD=q_HLD,
            k_KLD=k_KLD,
            v_KLD=v_KLD,
            layout=plan.layout,
            scoring=scoring,
            kv_heads=k_BKSD.shape[1],
            key_dim=k_BKSD.shape[3],
            value_dim=scoring.value_columns or scoring.value_dim(v_BKSD),
            store=store,
            table=plan.cache.table,
            comm=self.comm,
            compressed=plan.cache.holds_compressed,
            narrowed=queries.narrowed,
            in_hand=store.in_hand and self.replicas is None,
            once=plan.once,
        )
        out_HLD, lse_HL = self._over_ranks(plan, call)
        seen_HL = lse_HL
        if plan.compression.scored and sinks is not None:
            seen_HL = torch.logaddexp(lse_HL, sinks.to(lse_HL.dtype)[:, None])
        notes = self._compressed(plan, call, seen_HL)
        if latent is not None:
            # Before the store has finished: another layer's weights may come after that.
            out_HLD = latent.lift(out_HLD.to(q_BHSD.dtype))
        self._finished(plan, call, seen_HL, notes)
        if sinks is not None:
            out_HLD = add_sinks(out_HLD, lse_HL, sinks)
        out_BSHD = queries.put_back(out_HLD)
        self.comm.ledger.enter_dense()
        return out_BSHD

    def _stored(self, plan: PassPlan, store: KVStore, k_KLD: Tensor, v_KLD: Tensor) -> tuple[Tensor, Tensor]:
        """Append what this rank computed and keeps; returns the new rows without a stand-in."""
        rows, turn = len(plan.tokens), plan.compression.turn
        store.begin(complete=plan.complete, turn=turn is not None, ends=plan.ends_turn)
        if rows < k_KLD.shape[1]:
            k_KLD, v_KLD = k_KLD[:, :rows], v_KLD[:, :rows]
        if plan.layout.gathered:
            return k_KLD, v_KLD
        kept = plan.once("kept", lambda: _kept(plan, k_KLD.device))
        if kept is None:
            store.append(plan.layout.stored[plan.rank].sequences, k_KLD, v_KLD)
            return k_KLD, v_KLD
        if plan.once("alike", lambda: _alike(plan)) and store.hold_alike(plan.batch, k_KLD, v_KLD):
            return k_KLD, v_KLD
        for sequence, index in kept:
            store.append(sequence, *((k_KLD, v_KLD) if index is None else (k_KLD[:, index], v_KLD[:, index])))
        return k_KLD, v_KLD

    def _over_ranks(self, plan: PassPlan, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """The method over context-parallel ranks, then one result of heads that several ranks hold."""
        results = [self._attended(plan, part) for part in plan.cache.divided(call)]
        out_HLD, lse_HL = (
            results[0] if len(results) == 1 else (torch.cat(each, dim=1) for each in zip(*results, strict=True))
        )
        if self.replicas is None:
            return out_HLD, lse_HL
        # What is merged is, in the kernel's type, too coarse.
        out_HLD = out_HLD.to(lse_HL.dtype)
        return self.replicas.merge(call, out_HLD, lse_HL, complete=plan.complete, scored=plan.compression.scored)

    def _attended(self, plan: PassPlan, call: AttentionCall) -> tuple[Tensor, Tensor]:
        name = plan.method or self.planner.prefill_method(plan, call)
        if call.narrowed:
            name = last_layer_method(name, call)
        self.comm.ledger.attended(name)
        if name in self.methods:
            return self.methods[name](call)
        method = METHODS[name].make()
        result = _checked(name, method(call), call)
        # One whose result is refused is looked at again in the next call.
        self.methods[name] = method
        return result

    def _compressed(self, plan: PassPlan, call: AttentionCall, lse_HL: Tensor) -> Mapping[int, Notes]:
        """Compress a turn that ends, or observe one that goes on; returns what was noted of it."""
        turn = plan.compression.turn
        if turn is None:
            return {}
        assert self.compressor is not None
        if plan.compression.compress:
            return self.compressor.compress(call, lse_HL, turn, plan.compression.compress)
        if not plan.ends_turn:
            self.compressor.observe(call, lse_HL, turn)
        return {}

    def _finished(self, plan: PassPlan, call: AttentionCall, lse_HL: Tensor, notes: Mapping[int, Notes]) -> None:
        """End the layer in its store, once all groups of the batch have attended, and evict."""
        if plan.more:
            return
        plan.cache.store(call.layer).finish()
        if self.eviction is not None:
            self.eviction.follow(call, lse_HL, plan, notes)
        if plan.compression.turn is None:
            plan.cache.attended(call.layer, plan.slots)

    @staticmethod
    def _absorbing(plan: PassPlan, latent: LatentHeads | None, *, narrowed: bool) -> LatentHeads | None:
        """The latent heads that queries are absorbed into; None where rows are attended to as heads of their own.

        All ranks choose alike. Rows that are compressed, or were, are not expanded: they are chosen, and lie, by KV
        heads as they are cached.
        """
        if latent is None:
            return None
        if narrowed or plan.compression.scored or plan.cache.holds_compressed or plan.workload is None:
            return latent
        new, cached, ranks = plan.workload.new, plan.workload.cached, plan.workload.size
        dims = latent.rank, latent.key_dim, latent.value_dim
        return None if plan.once(("expands", *dims), lambda: expanding_pays(*dims, new, cached, ranks)) else latent


def _checked(name: str, result: Any, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """What a method returned the first time: its author may be somebody else."""
    rows = tuple(call.q_HLD.shape[:2])
    found = [tuple(getattr(each, "shape", ())) for each in result] if isinstance(result, tuple) else []
    if found != (right := [(*rows, call.value_dim), rows]):
        raise ValueError(
            f"attention method {name!r} returned {found or type(result).__name__}; allowed: outputs and their "
            f"log-sum-exps, of shapes {right}"
        )
    return result


def _alike(plan: PassPlan) -> bool:
    """Whether this rank keeps all rows that it computes, as many of each of several sequences."""
    stored = plan.layout.stored[plan.rank]
    lengths = set(np.diff(stored.bounds).tolist())
    return plan.batch > 1 and len(lengths) == 1 and plan.layout.kept_rows(plan.rank) is None


def _kept(plan: PassPlan, device: torch.device) -> list[tuple[int, slice | Tensor | None]] | None:
    """Rows that this rank keeps of each sequence, of the tokens that it computes; None in the place of all rows.

    Nothing where it keeps a single row of each of several sequences, in their order.
    """
    stored, rows = plan.layout.stored[plan.rank], plan.layout.kept_rows(plan.rank)
    if rows is None and len(stored) > 1 and stored.single:
        return None
    index = None if rows is None else upload(rows, device)
    runs = [(sequence, stored.run(sequence)) for sequence in range(plan.batch)]
    whole = len(plan.tokens)
    return [
        (sequence, None if run.stop - run.start == whole else run if index is None else index[run])
        for sequence, run in runs
        if run.stop > run.start
    ]
