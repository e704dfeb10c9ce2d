"""What hangs on an engine: its mesh, its methods, and the forward pass that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megakv.attention.choice import METHODS, last_layer_method
from megakv.attention.method import AttentionCall, AttentionMethod
from megakv.attention.partial import Scoring
from megakv.attention.runahead import Runahead
from megakv.cache.cache import ShardedCache
from megakv.cache.stores import KVStore, PackingStore
from megakv.distributed.comm import Communicator
from megakv.distributed.sharding import TokenBlock
from megakv.fairkv.compression import Compressor
from megakv.fairkv.divided import DividedStore
from megakv.fairkv.replicas import HeadReplicas
from megakv.fairkv.store import RaggedStore
from megakv.fairkv.turn import Turn
from megakv.injection.interface import add_sinks
from megakv.planning import ForwardPass, PassPlanner


@dataclass
class Runtime:
    """Attention of one engine's model over its mesh.

    Parameters
    ----------
    comm : Communicator
    planner : PassPlanner
        Decides where the tokens of a pass go and which methods serve it.
    compressor : Compressor, optional
        Compresses the cache after a prompt.
    replicas : HeadReplicas, optional
        KV heads on several tensor-parallel ranks that share their tokens.
    dtype : torch.dtype
        In which attention is computed and cached where its inputs are not of one type, or autocast would make them of
        another: the model's.

    Attributes
    ----------
    current : ForwardPass, optional
        The pass under way.
    cache : ShardedCache, optional
        That of the `generate` call under way.
    prompt : Turn, optional
        That the `generate` call under way reads first, in however many passes.
    methods : dict
        Those that were used so far, by name.
    last_layer : int, optional
        The layer whose results nobody but the output head reads, if the model has such a one.
    """

    comm: Communicator
    planner: PassPlanner
    compressor: Compressor | None = None
    replicas: HeadReplicas | None = None
    dtype: torch.dtype = torch.float32
    current: ForwardPass | None = None
    cache: ShardedCache | None = None
    prompt: Turn | None = None
    methods: dict[str, AttentionMethod] = field(default_factory=dict)
    last_layer: int | None = None
    _life: int = 0

    def __post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Begin with methods that expect nothing of an earlier pass."""
        self._life = self.comm.failures.life
        self.methods.clear()
        self.methods["runahead"] = Runahead(self.planner.runahead.chunk_tokens)

    def plan(self, new: TokenBlock, cache: ShardedCache, slots: int, wanted: TokenBlock) -> ForwardPass:
        """Decide how a pass is computed, and whether its keys and values are compressed.

        Parameters
        ----------
        new, wanted : TokenBlock
            The new tokens of all sequences, and those of them whose logits are asked for.
        cache : ShardedCache
        slots : int
            Slots of the sequence after the pass.

        Raises
        ------
        ValueError
            If a setting does not fit the prompt.
        """
        if self._life != self.comm.failures.life:
            # What was under way in a pass that failed went with its groups.
            self._forget()
            self.planner.forget()
        self.comm.ledger.decoding = int(np.diff(new.bounds).max(initial=0)) <= 1
        turn, compress = self._turn(new, cache, slots)
        asked = None if self.last_layer is None or not len(wanted) else wanted
        return self.planner.plan(new, cache, slots, turn=turn, compress=compress, wanted=asked)

    def _turn(self, new: TokenBlock, cache: ShardedCache, slots: int) -> tuple[Turn | None, tuple[int, ...]]:
        """The turn that a pass belongs to, if some of it may be compressed, and the sequences that are with this pass.

        A pass that is no part of a `generate` call's prompt is a turn of its own.
        """
        if self.compressor is None:
            return None, ()
        prompt = self.prompt
        turn = Turn(cache.length, slots) if prompt is None or slots > prompt.stop else prompt
        self.compressor.check(turn)
        if slots < turn.stop:
            possible = self.compressor.rows(np.array([turn.stop - turn.first]))
            return turn if possible else None, ()
        lengths = np.diff(new.bounds)
        rows = self.compressor.rows(lengths + cache.table.since(turn.first) if cache.length else lengths)
        return turn if rows else None, rows

    def attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """Store the new keys and values, then attend over all ranks, in one type.

        Under autocast a model hands over what its operators happen to return, in one turn of a session and perhaps not
        in the next: messages, caches and merges are all in the model's type, which loses nothing.

        Parameters and result are those of `_attend`.
        """
        kind = q_BHSD.device.type
        if not torch.is_autocast_enabled(kind) and q_BHSD.dtype == k_BKSD.dtype == v_BKSD.dtype:
            return self._attend(layer, q_BHSD, k_BKSD, v_BKSD, scoring, sinks)
        with torch.autocast(kind, enabled=False):
            q, k, v = (tensor.to(self.dtype) for tensor in (q_BHSD, k_BKSD, v_BKSD))
            return self._attend(layer, q, k, v, scoring, sinks).to(q_BHSD.dtype)

    def _attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """Store the new keys and values, then attend over all ranks.

        Parameters
        ----------
        layer : int
        q_BHSD, k_BKSD, v_BKSD : Tensor
            ``[1, H, L, D]``, ``[1, K, L, D]``, ``[1, K, L, Dv]`` of this rank's packed tokens. Rows beyond those of
            the layout stand in for an empty shard: they are neither stored nor attended from. Neither are, in the
            last layer, queries of tokens that nothing is asked of: their results are zero.
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
        rows = len(step.layout.tokens[rank])
        wanted = step.layout.wanted if layer == self.last_layer else None
        index = None if wanted is None else step.uploaded("wanted", wanted[rank], q_BHSD.device)
        store = step.cache.store(layer)
        if step.empty:
            # Nothing begins, nor ends, in a store.
            store.release()
            return q_BHSD.new_zeros((1, q_BHSD.shape[2], q_BHSD.shape[1], v_BKSD.shape[3]))
        if isinstance(store, RaggedStore | DividedStore):
            store.begin(complete=step.complete, turn=step.turn is not None, ends=step.ends_turn)
        if not step.layout.gathered:
            self._store(step, store, k_BKSD[0], v_BKSD[0])
        call = AttentionCall(
            layer=layer,
            q_HLD=q_BHSD[0, :, :rows] if index is None else q_BHSD[0].index_select(1, index),
            k_KLD=k_BKSD[0, :, :rows],
            v_KLD=v_BKSD[0, :, :rows],
            layout=step.layout,
            scoring=scoring,
            kv_heads=k_BKSD.shape[1],
            key_dim=k_BKSD.shape[3],
            value_dim=v_BKSD.shape[3],
            store=store,
            table=step.cache.table,
            comm=self.comm,
            compressed=step.cache.holds_compressed,
            narrowed=index is not None,
        )
        results = [self._attended(step, part) for part in step.cache.divided(call)]
        out_HLD, lse_HL = (
            results[0] if len(results) == 1 else (torch.cat(each, dim=1) for each in zip(*results, strict=True))
        )
        if self.replicas is not None:
            out_HLD, lse_HL = self.replicas.merge(layer, out_HLD, lse_HL, call.tokens, complete=step.complete)
        if step.turn is not None:
            assert self.compressor is not None
            whole = lse_HL if sinks is None else torch.logaddexp(lse_HL, sinks.to(lse_HL.dtype)[:, None])
            if step.compress:
                self.compressor.compress(call, whole, step.turn, step.compress)
            else:
                self.compressor.observe(call, whole, step.turn)
        store.release()
        if sinks is not None:
            out_HLD = add_sinks(out_HLD, lse_HL, sinks)
        heads, length, value_dim = q_BHSD.shape[1], q_BHSD.shape[2], v_BKSD.shape[3]
        out_BSHD = q_BHSD.new_zeros if rows < length or call.narrowed else q_BHSD.new_empty
        result = out_BSHD((1, length, heads, value_dim))
        result[0, slice(rows) if index is None else index] = out_HLD.transpose(0, 1).to(result.dtype)
        self.comm.ledger.enter_dense()
        return result

    def _store(self, step: ForwardPass, store: KVStore, k_KLD: Tensor, v_KLD: Tensor) -> None:
        """Append what this rank computed and keeps."""
        stored = step.layout.stored[self.comm.mesh.cp_rank]
        rows = self.kept_rows()
        kept = None if rows is None else step.uploaded("kept", rows, k_KLD.device)
        if kept is None and len(stored) > 1 and stored.single and isinstance(store, PackingStore):
            store.append_each(stored.sequences, k_KLD[:, : len(stored)], v_KLD[:, : len(stored)])
            return
        for sequence in range(step.batch):
            run = stored.run(sequence)
            if run.stop > run.start:
                index = run if kept is None else kept[run]
                store.append(sequence, k_KLD[:, index], v_KLD[:, index])

    def _attended(self, step: ForwardPass, call: AttentionCall) -> tuple[Tensor, Tensor]:
        method = step.method or self.planner.prefill_method(step, call)
        return self._method(last_layer_method(method, call) if call.narrowed else method)(call)

    def generated(self, cache: ShardedCache) -> bool:
        """Whether what comes next of a cache was generated by the call under way: in every row, one token more."""
        known = cache is self.cache and self.prompt is not None and 0 < self.prompt.stop <= cache.length
        return known and bool((cache.table.counts().sum(0) > 0).all())

    def _method(self, name: str) -> AttentionMethod:
        if name not in self.methods:
            self.methods[name] = METHODS[name]()
        return self.methods[name]

    def kept_rows(self) -> np.ndarray | None:
        """Of the pass under way, rows of this rank's tokens that it stores; None where it stores them all."""
        step = self.current
        assert step is not None
        return step.layout.kept_rows(self.comm.mesh.cp_rank)
