"""What the cost model says about a recipe's run, and what a dry run of it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megakv.attention.choice import CONTIGUOUS
from megakv.config import MegaKVConfig, load_config
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import hardware
from megakv.costmodel.shape import ModelShape
from megakv.dry_run import DryRun, dry_run
from megakv.runahead.partition import Partition, even, explicit
from recipes.common.catalogue import RECIPES, Run

PREFILLS = ("pass_kv", "pass_q")
DECODES = ("pass_q", "replicated")


@dataclass(frozen=True)
class Forecast:
    """Predicted figures of a run.

    Parameters
    ----------
    ttft_s, ttit_s : float, optional
        None where that is not predicted here: weights, or keys and values, off the accelerator or compressed.
    prefill, decode : str
        Methods; of ``auto`` those that are predicted to be fastest.
    """

    ttft_s: float | None
    ttit_s: float | None
    prefill: str
    decode: str


def load_run(name: str, run: Run) -> MegaKVConfig:
    """The configuration of a run."""
    return load_config(RECIPES / name / run.config)


def rehearse(name: str, run: Run) -> DryRun:
    """The dry run of a recipe's run, on the memory of its hardware.

    Raises
    ------
    ValueError, MegaKVError
        As `megakv.dry_run.dry_run`.
    """
    return dry_run(
        RECIPES / name,
        RECIPES / name / run.config,
        context=run.context,
        batch=run.batch,
        new_tokens=run.new_tokens,
        memory_bytes=hardware(run.hardware).spec.memory_bytes,
    )


def forecast(name: str, run: Run) -> Forecast:
    """What the cost model predicts for a recipe's run."""
    config = load_run(name, run)
    section, size = config.megakv, config.cp_size
    model = ModelShape.from_path(RECIPES / name, dtype=config.dtype)
    if section.feed_forward == "fp8":
        model = model.with_fp8_feed_forward()
    profile = hardware(run.hardware).on_mesh(cp_size=size, tp_size=config.tp_size)
    lengths = (run.context,) * run.batch
    times = PrefillTimes(
        profile,
        model,
        Workload(lengths, (0,) * run.batch, size),
        tp_size=config.tp_size,
        kv=section.runahead.kv,
        chunk_tokens=section.runahead.chunk_tokens,
    )
    chosen = section.context_parallel.prefill
    partitions = _partitions(section.runahead.partition, run.context, size, run.batch)
    names = PREFILLS if chosen == "auto" and size > 1 else ("pass_kv" if size == 1 else chosen,)
    prefills = {method: times.seconds(method, partitions if method in CONTIGUOUS else None) for method in names}
    step = Workload((1,) * run.batch, lengths, size)
    wanted = section.context_parallel.decode
    methods = DECODES if wanted == "auto" and size > 1 else ("pass_q" if size == 1 else wanted,)
    decodes = {method: ttit_seconds(profile, model, step, method, tp_size=config.tp_size) for method in methods}
    prefill, decode = min(prefills, key=prefills.__getitem__), min(decodes, key=decodes.__getitem__)
    elsewhere = section.offload.enabled or section.fairkv.budget is not None or section.runahead.kv == "last"
    return Forecast(
        ttft_s=None if section.offload.weights else prefills[prefill],
        ttit_s=None if elsewhere else decodes[decode],
        prefill=prefill if size > 1 else "one context-parallel rank",
        decode=decode,
    )


def _partitions(given: Any, context: int, size: int, batch: int) -> tuple[Partition, ...]:
    own = even(context, size) if isinstance(given, str) else explicit(given, context, size)
    return (own,) * batch
