"""What hangs on an engine: its mesh, its methods, and the forward pass that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megakv.attention.choice import METHODS, choose_decode, choose_prefill, load_evidence
from megakv.attention.method import AttentionCall, AttentionMethod
from megakv.attention.partial import Scoring
from megakv.cache import ShardedCache
from megakv.comm import Communicator
from megakv.config import ContextParallelConfig
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.injection.interface import add_sinks
from megakv.sharding import Layout, TokenBlock, balanced, replicated, round_robin

DECODE_STEPS = 256
"""Cached tokens for which a choice of decode method is kept."""


@dataclass(frozen=True)
class ForwardPass:
    """One call of the model, as all ranks see it.

    Parameters
    ----------
    layout : Layout
        Where its tokens are computed and kept.
    cache : ShardedCache
        Where their keys and values go.
    method : str, optional
        The attention method of all layers; None where each layer chooses by its shape.
    batch, slots : int
        Rows of the input, and slots of the sequence after this pass.
    workload : Workload
        Its new and cached tokens.
    chosen : dict
        What layers of a shape chose.
    """

    layout: Layout
    cache: ShardedCache
    method: str | None
    batch: int
    slots: int
    workload: Workload
    chosen: dict[AttentionShape, str] = field(default_factory=dict)


@dataclass
class Runtime:
    """Attention of one engine's model over its mesh.

    Parameters
    ----------
    comm : Communicator
    config : ContextParallelConfig
    heads, kv_heads : int
        Query and KV heads of the whole model, for the choice of method.
    shape : ModelShape, optional
        Sizes of the whole model, for the choice of decode method; without them it goes by the batch.

    Raises
    ------
    ValueError
        If a file that the choice of method needs cannot be used.
    """

    comm: Communicator
    config: ContextParallelConfig
    heads: int
    kv_heads: int
    shape: ModelShape | None = None
    current: ForwardPass | None = None
    cache: ShardedCache | None = None
    methods: dict[str, AttentionMethod] = field(default_factory=dict)
    _decode_methods: dict[Workload, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype = None if self.shape is None else self.shape.dtype
        self.evidence = load_evidence(self.config, self.comm, heads=self.heads, kv_heads=self.kv_heads, dtype=dtype)

    def plan(self, new: TokenBlock, cache: ShardedCache, slots: int) -> ForwardPass:
        """Decide where the new tokens of a pass go and which method serves it.

        Fewer than 2N new tokens per sequence go the way of decoding: balanced chunks would be empty.
        """
        size = self.comm.mesh.cp_size
        held = cache.table.counts() if cache.length else None
        lengths = np.diff(new.bounds)
        cached = np.zeros_like(lengths) if held is None else held.sum(0)
        workload = Workload(tuple(lengths.tolist()), tuple(cached.tolist()), size)
        method: str | None = None
        if size == 1:
            layout, method = balanced(new, 1), "pass_kv"
        elif int(lengths.max(initial=0)) < 2 * size:
            method = self._decode_method(workload)
            layout = (replicated if method == "replicated" else round_robin)(new, size, held)
        else:
            layout = balanced(new, size, held)
        return ForwardPass(layout=layout, cache=cache, method=method, batch=new.batch, slots=slots, workload=workload)

    def _decode_method(self, workload: Workload) -> str:
        """The choice for a step of decoding, made anew every `DECODE_STEPS` cached tokens."""
        rounded = tuple(count // DECODE_STEPS * DECODE_STEPS for count in workload.cached)
        known = Workload(workload.new, rounded, workload.size)
        if known not in self._decode_methods:
            self._decode_methods.clear()
            self._decode_methods[known] = choose_decode(
                self.config, self.evidence, known, self.shape, self.comm.mesh.tp_size
            )
        return self._decode_methods[known]

    def _prefill_method(self, step: ForwardPass, call: AttentionCall) -> str:
        """The choice of a layer, by the tensors that it really has: the same on all ranks of a ring."""
        scoring = call.scoring
        shape = AttentionShape(
            heads=call.q_HLD.shape[0],
            kv_heads=call.kv_heads,
            key_dim=call.key_dim,
            value_dim=call.value_dim,
            element_bytes=call.q_HLD.element_size(),
            window=scoring.window,
            kernel="flash" if scoring.softcap is None and scoring.alibi_slopes is None else "math",
        )
        if shape not in step.chosen:
            step.chosen[shape] = choose_prefill(self.config, self.evidence, step.workload, shape)
        return step.chosen[shape]

    def attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """Store the new keys and values, then attend over all ranks.

        Parameters
        ----------
        layer : int
        q_BHSD, k_BKSD, v_BKSD : Tensor
            ``[1, H, L, D]``, ``[1, K, L, D]``, ``[1, K, L, Dv]`` of this rank's packed tokens. Rows beyond those of
            the layout stand in for an empty shard: they are neither stored nor attended from.
        scoring : Scoring
        sinks : Tensor, optional
            ``[H]`` attention sinks.

        Returns
        -------
        Tensor
            ``[1, L, H, Dv]`` in the type of `q_BHSD`.
        """
        step = self.current
        assert step is not None, "attention outside a forward pass"
        self.comm.ledger.leave_dense()
        rank = self.comm.mesh.cp_rank
        tokens = step.layout.tokens[rank]
        rows = len(tokens)
        store = step.cache.store(layer)
        kept = self.kept_rows()
        for sequence in range(step.batch):
            run = step.layout.stored[rank].run(sequence)
            if run.stop > run.start:
                index = run if kept is None else torch.from_numpy(kept[run]).to(k_BKSD.device)
                store.append(sequence, k_BKSD[0][:, index], v_BKSD[0][:, index])
        call = AttentionCall(
            layer=layer,
            q_HLD=q_BHSD[0, :, :rows],
            layout=step.layout,
            scoring=scoring,
            kv_heads=k_BKSD.shape[1],
            key_dim=k_BKSD.shape[3],
            value_dim=v_BKSD.shape[3],
            store=store,
            table=step.cache.table,
            comm=self.comm,
        )
        elsewhere = store.attend_elsewhere(call)
        out_HLD, lse_HL = self._method(step.method or self._prefill_method(step, call))(call)
        if elsewhere is not None:
            elsewhere.merge_into(out_HLD, lse_HL)
        store.release()
        if sinks is not None:
            out_HLD = add_sinks(out_HLD, lse_HL, sinks)
        heads, length, value_dim = q_BHSD.shape[1], q_BHSD.shape[2], v_BKSD.shape[3]
        out_BSHD = q_BHSD.new_zeros if rows < length else q_BHSD.new_empty
        result = out_BSHD((1, length, heads, value_dim))
        result[0, :rows] = out_HLD.transpose(0, 1)
        self.comm.ledger.enter_dense()
        return result

    def _method(self, name: str) -> AttentionMethod:
        if name not in self.methods:
            self.methods[name] = METHODS[name]()
        return self.methods[name]

    def kept_rows(self) -> np.ndarray | None:
        """Of the pass under way, rows of this rank's tokens that it stores; None where it stores them all."""
        step = self.current
        assert step is not None
        if not step.layout.replicated:
            return None
        rank = self.comm.mesh.cp_rank
        tokens, stored = step.layout.tokens[rank], step.layout.stored[rank]
        width = step.slots + 1
        keys = tokens.sequence * width + tokens.slot
        return np.searchsorted(keys, stored.sequence * width + stored.slot)
