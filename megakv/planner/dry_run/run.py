"""All ranks of a run, one after another in one process: no weights, no accelerator, no network."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from megakv.attention.methods import is_contiguous
from megakv.base.errors import in_units
from megakv.base.partition import even, explicit
from megakv.costmodel.config_sizes import positions as positions_of
from megakv.costmodel.memory import GIB, RankShare, share_memory
from megakv.costmodel.shape import ModelShape
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import TokenBlock
from megakv.engine.config import MegaKVConfig, load_config
from megakv.engine.generation import LengthLimits
from megakv.engine.loading import empty_model
from megakv.engine.named_files import check_files
from megakv.fairkv.budgets import is_compressed, tokens_per_head
from megakv.fairkv.placement import place_heads, read_mapping
from megakv.planner.dry_run.share import WholeModel
from megakv.weights.folder import local_directory, read_config
from megakv.weights.formats import choose_format
from megakv.weights.placement import contiguous_head_map, head_counts

GB = 10**9
LARGEST_CONTEXT = 1 << 24
"""Tokens of a sequence whose shards are laid out here; positions of all of them are in memory."""


@dataclass(frozen=True)
class VirtualRank:
    """One rank of the mesh."""

    rank: int
    cp_rank: int
    tp_rank: int
    tokens: int  # Whose queries it computes, over the batch.
    kept: int  # Whose keys and values it keeps, before compression.
    # On the accelerator: weights and buffers; keys and values when the prompt is read, where they are compressed with
    # the one layer that is not yet, where they are offloaded only staging buffers and what stays; tensors of the layer
    # under way and the shards that a ring keeps on their way, as the cost model estimates them.
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    # Off the accelerator: the pages of keys, values and activations, and weights; the latter by themselves, which lie
    # all in host memory or all on disk.
    host_bytes: int = 0
    host_weight_bytes: int = 0
    disk_weight_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """On the accelerator."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


@dataclass(frozen=True)
class DryRun:
    """What a run would be."""

    model: str
    model_type: str
    mesh: dict[str, int]  # ``cp`` and ``tp``.
    context: int
    new_tokens: int
    batch: int
    parameters: int  # Elements of the whole model; its tensors, and those of them that ranks share.
    cut_parameters: int
    tensors: int
    ranks: tuple[VirtualRank, ...]  # In rank order.
    memory_bytes: int | None = None  # Of one accelerator; None: not known.
    host_budget: int | None = None  # Bytes that each rank may offload; None: nothing is offloaded.
    host_taken: int = 0  # Bytes of host memory that each rank takes at start, whatever it uses of them.
    page_bytes: int = 1  # Of the pages that budgets are cut into: none lies partly in host memory and partly on disk.

    @property
    def problem(self) -> str | None:
        """What does not fit, with the settings that would change it; None if all does."""
        worst = max(self.ranks, key=lambda rank: rank.total_bytes)
        if self.memory_bytes is not None and worst.total_bytes > self.memory_bytes:
            return (
                f"rank {worst.rank} needs {worst.total_bytes / GB:.1f} GB (weights {worst.weight_bytes / GB:.1f}, keys "
                f"and values {worst.kv_bytes / GB:.1f}, activations about {worst.activation_bytes / GB:.1f}) but an "
                f"accelerator has {self.memory_bytes / GB:.1f} GB; {self._remedy(worst)}"
            )
        fullest = max(self.ranks, key=lambda rank: rank.host_bytes)
        disk = (self.host_budget or 0) - self.host_taken
        for held, room, where, name in (
            (fullest.host_weight_bytes, self.host_taken, "in host memory", "host_gb"),
            (fullest.disk_weight_bytes, disk, "on disk", "disk_gb"),
        ):
            if held > room:
                return (
                    f"rank {fullest.rank} offloads {in_units(held)} of weights, which lie {where} alone, but "
                    f"megakv.offload.{name} allows {in_units(room)}; raise it, or tensor_parallel.tp_size"
                )
        if self.host_budget is not None:
            tiers = self.host_taken - fullest.host_weight_bytes, disk - fullest.disk_weight_bytes
            held = fullest.host_weight_bytes + fullest.disk_weight_bytes
            room = held + sum(tier // self.page_bytes * self.page_bytes for tier in tiers)
            if fullest.host_bytes > room:
                return (
                    f"rank {fullest.rank} offloads {in_units(fullest.host_bytes)} in pages of "
                    f"megakv.offload.page_kib but megakv.offload.host_gb and disk_gb have room for {in_units(room)} "
                    "in whole pages; raise them, or megakv.context_parallel.size"
                )
        return None

    def _remedy(self, worst: VirtualRank) -> str:
        if worst.weight_bytes > worst.total_bytes / 2:
            return "raise tensor_parallel.tp_size, or use megakv.weights.format = 'fp8' where the accelerator has FP8"
        return "raise megakv.context_parallel.size, or lower --context or --batch"

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        values = asdict(self)
        values["ranks"] = [{**asdict(rank), "total_bytes": rank.total_bytes} for rank in self.ranks]
        return {**values, "problem": self.problem}


def dry_run(
    model: str | Path,
    config: MegaKVConfig | dict[str, Any] | str | Path,
    *,
    context: int | None = None,
    batch: int = 1,
    new_tokens: int = 0,
    memory_bytes: int | None = None,
    made: dict[tuple[torch.dtype, str], PreTrainedModel] | None = None,
) -> DryRun:
    """Build every rank's share of a model on the meta device, run it on shapes, and sum up its memory.

    model: only config.json is read.
    config: the JSON of the run.
    context: tokens of each prompt; as many as the model has positions if None.
    batch, new_tokens: prompts, and tokens generated for each.
    memory_bytes: of one accelerator.
    made: this model without weights, by type and weights' format, as earlier runs made it; this run adds its own.
    Raises ValueError if a setting is impossible, by its name: the mesh, the positions of the model, a file that is not
        there.
    Raises MegaKVError if shapes do not fit or shards do not add up.
    """
    parsed = load_config(config)
    directory = local_directory(model, weights=False)
    described = read_config(directory)
    form = choose_format(parsed.megakv.weights.format, directory, described)
    positions = positions_of(described.get_text_config())
    context = _check_lengths(positions if context is None else context, batch, new_tokens)
    check_files(parsed)
    mapping = read_mapping(parsed.megakv.fairkv, parsed.tp_size)
    if mapping is None:
        head_map = contiguous_head_map(*head_counts(described), parsed.tp_size)
    else:
        head_map = place_heads(mapping, described)
    dtype = parsed.dtype or described.get_text_config().dtype or torch.float32
    made = {} if made is None else made
    if (key := (dtype, form.name)) not in made:
        made[key] = empty_model(deepcopy(described), dtype)
        form.replace(made[key])
    whole = WholeModel.plan(made[key], dtype, head_map, parsed.injection_policy, form.multiples)
    for placement in whole.placements:
        form.check_cut(placement, parsed.tp_size)
    LengthLimits(whole.model, parsed).check(context, {"max_new_tokens": new_tokens})
    tokens, kept = token_counts(parsed, context, batch)
    shape = ModelShape.from_config(described, dtype=dtype)
    share_kept, fairkv, held_tokens = kept_share(parsed, shape, context), parsed.megakv.fairkv, new_tokens
    if fairkv.decode_interval is not None and fairkv.budget is not None:
        # What is evicted makes room.
        held_tokens = min(new_tokens, int(fairkv.budget) + fairkv.decode_interval)
    # Shorter shards differ in nothing but their length.
    shares = whole.shares(max(tokens), weights=form)
    offload = parsed.megakv.offload
    on_disk = offload.weights == "disk"

    def rank_of(cp_rank: int, share: RankShare) -> VirtualRank:
        memory = share_memory(
            shape,
            share,
            computed=tokens[cp_rank],
            kept=kept[cp_rank],
            batch=batch,
            # Generated tokens are kept where the prompt is, in about the same shares.
            answer=batch * -(-held_tokens * kept[cp_rank] // (context * batch)),
            cp_size=parsed.cp_size,
            tp_size=parsed.tp_size,
            kept_share=share_kept,
            offload=offload.sizes if offload.enabled else None,
            # As in the engine, what a last rank collects comes without activations.
            recomputes=parsed.megakv.runahead.kv == "sharded" or parsed.cp_size == 1,
            weights_away=bool(offload.weights),
        )
        return VirtualRank(
            rank=cp_rank * parsed.tp_size + share.tp_rank,
            cp_rank=cp_rank,
            tp_rank=share.tp_rank,
            tokens=tokens[cp_rank],
            kept=kept[cp_rank],
            weight_bytes=memory.weights,
            kv_bytes=memory.cache,
            activation_bytes=memory.working,
            host_bytes=memory.host,
            host_weight_bytes=0 if on_disk else memory.host_weights,
            disk_weight_bytes=memory.host_weights if on_disk else 0,
        )

    return DryRun(
        model=str(model),
        model_type=described.model_type,
        mesh={"cp": parsed.cp_size, "tp": parsed.tp_size},
        context=context,
        new_tokens=new_tokens,
        batch=batch,
        parameters=whole.parameters,
        cut_parameters=whole.cut,
        tensors=len(whole.shapes),
        ranks=tuple(rank_of(cp_rank, share) for cp_rank in range(parsed.cp_size) for share in shares),
        memory_bytes=memory_bytes,
        host_budget=int((offload.host_gb + offload.disk_gb) * GIB) if offload.enabled else None,
        host_taken=offload.host_bytes if offload.enabled else 0,
        page_bytes=offload.page_kib << 10,
    )


def kept_share(config: MegaKVConfig, shape: ModelShape, context: int) -> float:
    """What part of a prompt's keys and values is kept.

    Raises ValueError if a compression setting does not fit the model or the prompt.
    """
    fairkv = config.megakv.fairkv
    if fairkv.budget is None or not is_compressed(fairkv.budget, fairkv.min_tokens, np.array(context)):
        return 1.0
    least = fairkv.make_method(len(shape.layers), shape.cached_heads).least
    return tokens_per_head(fairkv.budget, context, least) / context


def token_counts(config: MegaKVConfig, context: int, batch: int) -> tuple[list[int], list[int]]:
    """Tokens that every context-parallel rank computes, and that it keeps, over the batch.

    As the engine lays them out; where a measured profile or a table would cut the chain unevenly, evenly.

    Raises ValueError if a partition does not fit the context.
    """
    section, size = config.megakv, config.cp_size
    if not is_contiguous(section.context_parallel.prefill):
        # Every sequence of a batch is dealt out by itself.
        slots = np.arange(context, dtype=np.int64)
        layout = balanced(TokenBlock(np.zeros_like(slots), slots, slots, 1), size)
        counts = [batch * len(block) for block in layout.tokens]
        return counts, counts
    given, chain = section.runahead.partition, section.context_parallel.prefill == "runahead"
    own = even(context, size) if isinstance(given, str) or not chain else explicit(given, context, size)
    counts = [batch * part for part in own]
    if section.runahead.kv == "last":
        return counts, [0] * (size - 1) + [batch * context]
    return counts, counts


def _check_lengths(context: int | None, batch: int, new_tokens: int) -> int:
    if context is None:
        raise ValueError("context: the model's config names no number of positions; give the tokens of a prompt")
    if not 1 <= context <= LARGEST_CONTEXT:
        raise ValueError(f"context = {context}: allowed: 1 to {LARGEST_CONTEXT} tokens")
    for name, value, least in (("batch", batch, 1), ("new_tokens", new_tokens, 0)):
        if value < least:
            raise ValueError(f"{name} = {value}: allowed: {least} or more")
    return context
