"""What the cost model says about a recipe's run, and what a dry run of it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from megakv.attention.methods import is_contiguous
from megakv.base.partition import Partition, even, explicit
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import hardware
from megakv.costmodel.shape import ModelShape
from megakv.engine.config import MegaKVConfig, load_config
from megakv.fairkv.budgets import tokens_per_head
from megakv.offload.times import moved_seconds, offloaded_step
from megakv.planner.dry_run import DryRun, dry_run
from recipes.common.catalogue import RECIPES, Run

PREFILLS = ("pass_kv", "pass_q")
DECODES = ("pass_q", "replicated")


@dataclass(frozen=True)
class Forecast:
    """Predicted figures of a run.

    Parameters
    ----------
    ttft_s, ttit_s : float
        Where keys and values are compressed, all heads are taken to keep as many: what uneven budgets cost beyond that
        depends on the prompt.
    prefill, decode : str
        Methods; of ``auto`` those that are predicted to be fastest.
    """

    ttft_s: float
    ttit_s: float
    prefill: str
    decode: str


def load_run(name: str, run: Run) -> MegaKVConfig:
    """The configuration of a run."""
    return load_config(RECIPES / name / run.config)


def dry_run_of(name: str, run: Run, made: dict[tuple[torch.dtype, str], PreTrainedModel]) -> DryRun:
    """The dry run of a recipe's run, on the memory of its hardware; its runs share the models `made`."""
    return dry_run(
        RECIPES / name,
        RECIPES / name / run.config,
        context=run.context,
        batch=run.batch,
        new_tokens=run.new_tokens,
        memory_bytes=hardware(run.hardware).spec.memory_bytes,
        made=made,
    )


def forecast(name: str, run: Run) -> Forecast:
    """What the cost model predicts for a recipe's run."""
    config = load_run(name, run)
    model = ModelShape.from_path(RECIPES / name, dtype=config.dtype)
    if config.megakv.weights.format == "fp8":
        model = model.with_fp8_feed_forward()
    profile = hardware(run.hardware).on_mesh(cp_size=config.cp_size, tp_size=config.tp_size)
    prefills, decodes = _prefills(config, run, profile, model), _decodes(config, run, profile, model)
    prefill, decode = min(prefills, key=prefills.__getitem__), min(decodes, key=decodes.__getitem__)
    return Forecast(
        ttft_s=prefills[prefill],
        ttit_s=decodes[decode],
        prefill=prefill if config.cp_size > 1 else "one context-parallel rank",
        decode=decode,
    )


def _prefills(config: MegaKVConfig, run: Run, profile: HardwareProfile, model: ModelShape) -> dict[str, float]:
    """TTFT by method."""
    section, size = config.megakv, config.cp_size
    times = PrefillTimes(
        profile,
        model,
        Workload((run.context,) * run.batch, (0,) * run.batch, size),
        tp_size=config.tp_size,
        kv=section.runahead.kv,
        chunk_tokens=section.runahead.chunk_tokens,
    )
    chosen = section.context_parallel.prefill
    partitions = _partitions(section.runahead.partition, run.context, size, run.batch)
    names = PREFILLS if chosen == "auto" and size > 1 else ("pass_kv" if size == 1 else chosen,)
    least = 0.0
    if section.offload.enabled and profile.host_link is not None:
        tokens = -(-run.context * run.batch // size)
        weights = bool(section.offload.weights)
        least = moved_seconds(profile.host_link, model, tokens, tp_size=config.tp_size, weights=weights)
    return {name: max(least, times.seconds(name, partitions if is_contiguous(name) else None)) for name in names}


def _decodes(config: MegaKVConfig, run: Run, profile: HardwareProfile, model: ModelShape) -> dict[str, float]:
    """TTIT by method, behind the prompt."""
    section, budget, link = config.megakv, config.megakv.fairkv.budget, profile.host_link
    # One rank that gathers all keys and values decodes alone.
    size = 1 if section.runahead.kv == "last" else config.cp_size
    held = run.context if budget is None else round(tokens_per_head(budget, run.context, 1))
    step = Workload((1,) * run.batch, (held,) * run.batch, size)
    wanted = section.context_parallel.decode
    names = DECODES if wanted == "auto" and size > 1 else ("pass_q" if size == 1 else wanted,)

    def seconds(method: str) -> float:
        offload = section.offload
        if not offload.enabled or link is None:
            return ttit_seconds(profile, model, step, method, tp_size=config.tp_size)
        return offloaded_step(
            profile,
            link,
            model,
            step,
            method,
            tp_size=config.tp_size,
            plan=offload.method,
            weights=offload.weights or False,
            groups=offload.groups,
        ).seconds

    return {name: seconds(name) for name in names}


def _partitions(given: Any, context: int, size: int, batch: int) -> tuple[Partition, ...]:
    own = even(context, size) if isinstance(given, str) else explicit(given, context, size)
    return (own,) * batch
