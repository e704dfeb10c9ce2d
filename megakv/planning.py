"""What is decided about a pass before its layers run: where its tokens go, and which methods serve it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megakv.attention.choice import PREFILL, PrefillChoice, choose_decode, choose_prefill, load_evidence, plan_prefill
from megakv.attention.method import AttentionCall
from megakv.cache.cache import ShardedCache
from megakv.config import ContextParallelConfig
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.planner import PrefillPlanner
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.device import upload
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator
from megakv.distributed.sharding import (
    IntArray,
    Layout,
    TokenBlock,
    balanced,
    contiguous,
    on_last_rank,
    replicated,
    round_robin,
)
from megakv.fairkv.turn import Turn
from megakv.runahead.config import RunaheadConfig
from megakv.runahead.partition import Partition
from megakv.runahead.source import PartitionSource

DECODE_STEPS = 256
"""Cached tokens for which a choice of decode method is kept."""

QUERIES_TRAVEL = ("pass_q", "replicated", "local")
"""Methods in which no cached key and value leaves its rank."""


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
    workload : Workload, optional
        Its new and cached tokens, if it has new ones.
    turn : Turn, optional
        What its tokens belong to, where some of it may be compressed at its end; else None.
    compress : tuple of int
        Sequences of which each layer compresses that turn after its attention, as it ends with this pass.
    complete : bool
        Whether attention finds all tokens on every rank that has their KV head, shared or not: where nothing was
        cached, and there are context-parallel ranks, whose methods know of whole heads only.
    chosen : dict
        What layers of a shape chose.
    """

    layout: Layout
    cache: ShardedCache
    method: str | None
    batch: int
    slots: int
    workload: Workload | None
    turn: Turn | None = None
    compress: tuple[int, ...] = ()
    complete: bool = False
    chosen: dict[AttentionShape, str] = field(default_factory=dict)
    _uploads: dict[str, Tensor] = field(default_factory=dict)

    def uploaded(self, name: str, rows: IntArray, device: torch.device) -> Tensor:
        """Rows on the device, by a name: those of one pass are the same in every layer, and copied once."""
        if name not in self._uploads:
            self._uploads[name] = upload(rows, device)
        return self._uploads[name]

    @property
    def empty(self) -> bool:
        """Whether it has no new token, as where a piece of a prompt is nothing but padding."""
        return not any(len(block) for block in self.layout.tokens)

    @property
    def stays(self) -> bool:
        """Whether cached keys and values stay with the rank that holds them, and queries come to them."""
        return self.layout.size == 1 or self.method in QUERIES_TRAVEL

    @property
    def ends_turn(self) -> bool:
        """Whether no later pass belongs to the turn."""
        return self.turn is None or self.slots == self.turn.stop


@dataclass
class PassPlanner:
    """Layouts and methods of one engine's passes.

    Parameters
    ----------
    comm : Communicator
    config : ContextParallelConfig
    heads, kv_heads : int
        Query and KV heads of the whole model, for the choice of method.
    shape : ModelShape, optional
        Sizes of the whole model, for the cost model; without them decoding goes by the batch, and partitions of
        KV-Runahead are not predicted.
    runahead : RunaheadConfig
        Where the chain's keys and values end, and how it cuts prompts.
    divided : bool
        Whether replicas of KV heads share tokens: like compressed ones, those do not travel.

    Attributes
    ----------
    choice : PrefillChoice, optional
        How the last prompt was spread.
    partitions : PartitionSource
        How prompts are cut for the chain.

    Raises
    ------
    ValueError
        If a file that the choice of method or partition needs cannot be used.
    """

    comm: Communicator
    config: ContextParallelConfig
    heads: int
    kv_heads: int
    shape: ModelShape | None = None
    runahead: RunaheadConfig = field(default_factory=RunaheadConfig)
    divided: bool = False
    choice: PrefillChoice | None = None
    _decode_methods: dict[Workload, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._agreement = Agreement(self.comm)
        dtype = None if self.shape is None else self.shape.dtype
        self.evidence = load_evidence(self.config, self.comm, heads=self.heads, kv_heads=self.kv_heads, dtype=dtype)
        profile = self.evidence.profile
        self.partitions = PartitionSource.from_config(self.runahead, comm=self.comm, model=self.shape)
        self._predictions: PrefillPlanner | None = None
        if profile is not None and self.shape is not None:
            self._predictions = PrefillPlanner.on(
                self.comm, profile, self.shape, kv=self.runahead.kv, chunk_tokens=self.runahead.chunk_tokens
            )
            self.partitions.predict = self._predictions.partition

    def plan(
        self,
        new: TokenBlock,
        cache: ShardedCache,
        slots: int,
        *,
        turn: Turn | None = None,
        compress: tuple[int, ...] = (),
        wanted: TokenBlock | None = None,
    ) -> ForwardPass:
        """Decide where the new tokens of a pass go and which method serves it.

        Fewer than 2N new tokens per sequence go the way of decoding: balanced chunks would be empty.

        Parameters
        ----------
        new : TokenBlock
            The new tokens of all sequences.
        cache : ShardedCache
            What is held already.
        slots : int
            Slots of the sequence after the pass.
        turn : Turn, optional
            As in `ForwardPass`: what may be compressed takes all queries, those of the last layer too.
        compress : tuple of int
            As in `ForwardPass`.
        wanted : TokenBlock, optional
            The tokens whose results are asked for of the last layer, if it can do with fewer than all. It does where
            there is one of each sequence, as when text is generated.

        Raises
        ------
        ValueError
            If the partition that was asked for does not fit the prompt.
        """
        size = self.comm.mesh.cp_size
        if not len(new):
            # There is nothing to attend to; a stand-in row on every rank goes through the layers.
            return ForwardPass(balanced(new, size), cache, "local", new.batch, slots, workload=None)
        held = cache.table.counts() if cache.length else None
        lengths = np.diff(new.bounds)
        cached = np.zeros_like(lengths) if held is None else held.sum(0)
        workload = Workload(tuple(lengths.tolist()), tuple(cached.tolist()), size)
        method: str | None
        if size == 1:
            layout, method = balanced(new, 1), "local" if cache.holds_compressed or self.divided else "pass_kv"
        elif int(lengths.max(initial=0)) < 2 * size and not self._cut_by_user(workload):
            layout, method = self._decode_layout(new, workload, held)
            wanted = None
        elif self.divided and cache.length:
            self.choice, method = PrefillChoice("pass_q"), "pass_q"
            layout = balanced(new, size, held)
        else:
            choice = self._planned(workload, compressed=cache.holds_compressed)
            self.choice, method = choice, choice.method
            if choice.partitions is None:
                layout = balanced(new, size, held)
            else:
                gathered = method == "runahead" and self.runahead.kv == "last"
                layout = contiguous(new, choice.partitions, gathered=gathered)
        if turn is None and wanted is not None and np.diff(wanted.bounds).max() <= 1:
            layout = layout.narrowed(wanted)
        return ForwardPass(
            layout=layout,
            cache=cache,
            method=method,
            batch=new.batch,
            slots=slots,
            workload=workload,
            turn=turn,
            compress=compress,
            complete=size > 1 and cache.length == 0,
        )

    def prefill_method(self, step: ForwardPass, call: AttentionCall) -> str:
        """The choice of a layer, by the tensors that it really has: that of the first rank of its ring, on all."""
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
            assert step.workload is not None
            chosen = choose_prefill(self.config, self.evidence, step.workload, shape)
            if self.config.prefill == "auto":
                index = self.comm.device_tensor([PREFILL.index(chosen)])
                chosen = PREFILL[int(self.comm.cp_broadcast(index, operation="control", layer=call.layer))]
            step.chosen[shape] = chosen
        return step.chosen[shape]

    def forget(self) -> None:
        """A call failed in the middle: of what rank 0 said, ranks may have heard different parts."""
        self._decode_methods.clear()

    def decode_method(self, workload: Workload) -> str:
        """The choice for a step of decoding; `auto` is rank 0's, made anew every `DECODE_STEPS` cached tokens."""
        if self.config.decode != "auto":
            return self.config.decode
        rounded = tuple(count // DECODE_STEPS * DECODE_STEPS for count in workload.cached)
        known = Workload(workload.new, rounded, workload.size)
        if known not in self._decode_methods:
            self._decode_methods.clear()
            self._decode_methods[known] = self._agreement.decide(
                lambda: choose_decode(self.config, self.evidence, known, self.shape, self.comm.mesh.tp_size)
            )
        return self._decode_methods[known]

    def _planned(self, workload: Workload, *, compressed: bool) -> PrefillChoice:
        """How a prompt is spread: rank 0's word where that is computed from measurements.

        Floats may differ in their last bits between hosts; at a tie, ranks would part and wait for each other.
        """

        def plan() -> PrefillChoice:
            return plan_prefill(
                self.config,
                self.evidence,
                workload,
                sizes=self._sizes,
                planner=self._predictions,
                compressed=compressed,
            )

        weighed = self._predictions is not None or self.partitions.table is not None
        return self._agreement.decide(plan) if weighed else plan()

    def _sizes(self, new: int, cached: int) -> Partition:
        """The partition of one sequence; a row of a batch may have no new token."""
        return self.partitions.sizes(new, cached) if new else (0,) * self.comm.mesh.cp_size

    def _cut_by_user(self, workload: Workload) -> bool:
        """Whether the user gave token counts for just these prompts, however short they are."""
        given = self.partitions.given
        if self.config.prefill != "runahead" or isinstance(given, str) or not all(isinstance(n, int) for n in given):
            return False
        # Whole numbers that sum to 1 are fractions; a single token is decoded.
        return 1 < sum(given) and set(workload.new) == {sum(given)}

    def _decode_layout(self, new: TokenBlock, workload: Workload, held: np.ndarray | None) -> tuple[Layout, str]:
        """Where the tokens of a step of decoding go, and the method that serves it."""
        size = workload.size
        if self.runahead.kv == "last" and (held is None or not held[:-1].any()):
            return on_last_rank(new, size), "local"
        method = self.decode_method(workload)
        return (replicated if method == "replicated" else round_robin)(new, size, held), method
