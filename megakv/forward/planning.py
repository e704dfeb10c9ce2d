"""What is decided about a pass before its layers run: where its tokens go, and which methods serve it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch

from megakv.attention.method import AttentionCall
from megakv.attention.methods import METHODS, prefill_methods
from megakv.base.partition import Partition
from megakv.cache.cache import ShardedCache
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import worth_bytes
from megakv.costmodel.intensity import flops_per_byte
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator
from megakv.distributed.layouts import balanced, by_sequence, contiguous, on_last_rank, replicated, round_robin
from megakv.distributed.sharding import Layout, TokenBlock
from megakv.forward.choice import (
    Evidence,
    PrefillChoice,
    choose_decode,
    choose_prefill,
    choose_slices,
    load_evidence,
    plan_prefill,
)
from megakv.forward.config import ContextParallelConfig
from megakv.forward.pass_plan import PassPlan
from megakv.forward.prefill_planner import PrefillPlanner
from megakv.runahead.config import RunaheadConfig
from megakv.runahead.source import PartitionSource

DECODE_STEPS = 256
"""Cached tokens for which a choice of decode method is kept."""
KEPT_CHOICES = 256
"""Such choices that are kept: sequences come and go from step to step where many are served."""
MESSAGES, MESSAGE_ELEMENTS = 15, 1024
"""Sent to see what a message takes, and their size: about that of a layer's sum for one token."""


@dataclass(frozen=True)
class ModelTraits:
    """Properties of one engine's model; the defaults promise nothing."""

    last_layer: int | None = None
    """The layer whose results nobody but the output head reads, if the model has such a one."""
    few_rows: int = 1
    """Tokens of a pass up to which layers compute it as a step of decoding, on all ranks alike."""
    pairs: bool = False
    """Whether that multiplies bfloat16 by pairs where a sequence has many of them."""
    sliced_rows: int = 0
    """Tokens of a pass up to which slices, of all tokens on every rank, take less than shards of them do."""
    spread_rows: int = 0
    """Tokens that a pass attends to up to which ranks exchange all keys and values in one call of all layers."""
    slices: bool | None = None
    """Whether what ranks are spared by slices of feed-forward layers is worth a message; None: they have no slices."""
    length_dependent: bool = False
    """Whether rotary frequencies follow the longest sequence of a pass."""


@dataclass
class PassPlanner:
    """Layouts and methods of one engine's passes; heads and `shape`, for the cost model, are of the whole model.

    Without a shape decoding goes by the batch, and partitions of KV-Runahead are not predicted.
    """

    comm: Communicator
    config: ContextParallelConfig
    heads: int
    kv_heads: int
    shape: ModelShape | None = None
    runahead: RunaheadConfig = field(default_factory=RunaheadConfig)
    divided: bool = False
    """Whether replicas of KV heads share tokens: like compressed ones, those do not travel."""
    traits: ModelTraits = field(default_factory=ModelTraits)
    choice: PrefillChoice | None = None
    """How the last prompt was spread."""
    _decode_methods: dict[Workload, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._agreement = Agreement(self.comm)
        dtype = None if self.shape is None else self.shape.dtype
        self.evidence = load_evidence(self.config, self.comm, heads=self.heads, kv_heads=self.kv_heads, dtype=dtype)
        profile, mesh = self.evidence.profile, self.comm.mesh
        measures = self.config.prefill == "auto" and self.evidence == Evidence()
        if measures and mesh.cp_size > 1 and mesh.device.type == "cpu":
            here = self._agreement.together(lambda: flops_per_byte(self.comm, dtype or torch.float32))
            self.evidence = replace(self.evidence, flops_per_byte=self._agreement.decide(lambda: here))
        self.partitions = PartitionSource.from_config(self.runahead, comm=self.comm, model=self.shape)
        self._predictions: PrefillPlanner | None = None
        if profile is not None and self.shape is not None:
            self._predictions = PrefillPlanner.on(
                self.comm, profile, self.shape, kv=self.runahead.kv, chunk_tokens=self.runahead.chunk_tokens
            )
            self.partitions.predict = self._predictions.partition

    @property
    def gathers(self) -> bool:
        """Whether the last rank keeps what all ranks of a chain compute, and decodes alone."""
        return self.runahead.kv == "last" and self.comm.mesh.cp_size > 1

    @property
    def spreads_evenly(self) -> bool:
        """Whether ranks have about as many tokens of every prompt, whatever `auto` chooses."""
        informed = self.evidence.profile is not None or self.evidence.fit is not None
        return self.config.prefill != "runahead" and not (self.config.prefill == "auto" and informed)

    def decodes(self, workload: Workload, proposed: int = 0) -> bool:
        """Whether a pass, of which some tokens may be candidates, goes the way of decoding.

        With fewer than 2N new tokens per sequence balanced chunks would be empty.
        """
        few = max(workload.new) < 2 * workload.size or self._by_slices(workload)
        return 1 < workload.size and (proposed > 0 or (few and not self._cut_by_user(workload)))

    def _by_slices(self, workload: Workload) -> bool:
        """Whether a short prompt is computed as a step of decoding is."""
        free = self.config.prefill == "auto" and not self.gathers and not self.divided
        return free and workload.total_new <= self.traits.sliced_rows and self.decode_method(workload) == "tensor"

    def _at_once(self, workload: Workload, cache: ShardedCache) -> bool:
        """Whether a short prompt's layers are one call, in which all ranks have all keys and values."""
        plain = self.config.prefill == "auto" and not (self.divided or cache.compresses)
        return plain and workload.total <= self.traits.spread_rows

    def plan(
        self, new: TokenBlock, cache: ShardedCache, workload: Workload, proposed: int = 0
    ) -> tuple[Layout, str | None]:
        """Where the new tokens of a pass go, and the attention method of all layers; None where each layer chooses.

        `proposed` of them are candidates.
        """
        size = workload.size
        if size == 1:
            return Layout((new,), (new,)), "local" if cache.holds_compressed or self.divided else "pass_kv"
        held = cache.table.counts() if cache.length else None
        if self.decodes(workload, proposed):
            return self._decode_layout(new, workload, held)
        layout: Layout | None = None
        if self.config.prefill == "auto" and cache.outlives and not self.gathers:
            # Short prompts of several requests: each is one rank's where that leaves no rank behind.
            layout = by_sequence(new, size, held)
            if layout.apart:
                self.choice = PrefillChoice("local")
                return layout, "local"
        if self.divided and cache.length:
            self.choice = PrefillChoice("pass_q")
        else:
            decide = partial(
                plan_prefill,
                self.config,
                self.evidence,
                workload,
                sizes=self._sizes,
                planner=self._predictions,
                compressed=cache.holds_compressed,
            )
            # From measurements rank 0 decides: floats may differ in their last bits between hosts, and at a tie ranks
            # would part and wait for each other.
            measured = self._predictions is not None or self.partitions.table is not None
            self.choice = self._agreement.decide(decide) if measured else decide()
        partitions, method = self.choice.partitions, self.choice.method
        if partitions is None and method is None and self._at_once(workload, cache):
            method = "all_gather"
        if partitions is None:
            return layout or balanced(new, size, held), method
        return contiguous(new, partitions, gathered=method == "runahead" and self.gathers), method

    def prefill_method(self, step: PassPlan, call: AttentionCall) -> str:
        """The choice of a layer, by the tensors that it really has: that of the first rank of its ring, on all."""
        scoring = call.scoring
        shape = AttentionShape(
            heads=call.q_HLD.shape[0],
            kv_heads=call.kv_heads if scoring.latent is None else call.q_HLD.shape[0],
            key_dim=call.q_HLD.shape[2],
            value_dim=call.value_dim,
            latent=None if scoring.latent is None else scoring.latent.rank,
            row_dim=call.kv_heads * (call.key_dim + call.v_KLD.shape[2]),
            element_bytes=call.q_HLD.element_size(),
            window=scoring.window,
            kernel="flash" if scoring.softcap is None and scoring.alibi_slopes is None else "math",
        )
        return step.once(shape, lambda: self._agreed_prefill(step, shape, call.layer))

    def _agreed_prefill(self, step: PassPlan, shape: AttentionShape, layer: int) -> str:
        if self.config.prefill != "auto":
            return self.config.prefill
        assert step.workload is not None
        methods = prefill_methods()
        chosen = methods.index(choose_prefill(self.evidence, step.workload, shape))
        word, first = torch.tensor([chosen], device=self.comm.mesh.device), self.comm.mesh.cp_ranks[0]
        index = self.comm.broadcast(word, first, "cp", operation="control", layer=layer)
        return methods[int(index)]

    @property
    def may_slice(self) -> bool:
        """Whether decoding may go by slices of linears."""
        return self.comm.mesh.cp_size > 1 and self.config.decode in ("auto", "tensor")

    def slice_pays(self, spared: dict[str, int]) -> dict[str, bool]:
        """For which kinds of a layer's linears that takes less time, by rank 0's word: so many bytes are not read."""
        mesh, worth = self.comm.mesh, worth_bytes(self._message_s)
        decide = partial(
            choose_slices, self.evidence, spared, self.shape, size=mesh.cp_size, tp_size=mesh.tp_size, worth=worth
        )
        return self._agreement.decide(decide)

    @cached_property
    def _message_s(self) -> float | None:
        """What a small message over all context-parallel ranks takes here; None on accelerators. Collective."""
        if self.comm.mesh.device.type != "cpu":
            return None
        message, taken = torch.zeros(MESSAGE_ELEMENTS), []
        for _ in range(MESSAGES):
            begun = time.perf_counter()
            self.comm.all_gather(message, "cp", operation="control", layer=None)
            taken.append(time.perf_counter() - begun)
        return float(np.median(taken))

    def forget(self) -> None:
        """A call failed in the middle: of what rank 0 said, ranks may have heard different parts."""
        self._decode_methods.clear()

    def decode_method(self, workload: Workload) -> str:
        """The choice for a step of decoding; `auto` is rank 0's, made anew every `DECODE_STEPS` cached tokens.

        Sequences count as equally long: what a step reads is the sum, and each of many grows past a step at its own
        time.
        """
        if self.config.decode != "auto":
            return self.config.decode
        mean = sum(workload.cached) // len(workload.cached) // DECODE_STEPS * DECODE_STEPS
        new = -(-workload.total_new // len(workload.new))
        known = Workload((new,) * len(workload.new), (mean,) * len(workload.cached), workload.size)
        if known not in self._decode_methods:
            if len(self._decode_methods) >= KEPT_CHOICES:
                self._decode_methods.clear()
            self._decode_methods[known] = self._agreement.decide(
                lambda: choose_decode(
                    self.evidence, known, self.shape, self.comm.mesh.tp_size, slices=self.traits.slices
                )
            )
        return self._decode_methods[known]

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
        if self.gathers and (held is None or not held[:-1].any()):
            return on_last_rank(new, size), "local"
        method = self.decode_method(workload)
        return (replicated if METHODS[method].replicated else round_robin)(new, size, held), method
