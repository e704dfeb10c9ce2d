"""What may be run: meshes of some GPUs, and the ways to make a model fit them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megakv.base.partition import Partition
from megakv.costmodel.memory import GIB, RankMemory
from megakv.costmodel.presets import Hardware
from megakv.costmodel.shape import ModelShape
from megakv.fairkv.mapping import HeadMapping
from megakv.offload.times import Objective, recomputes
from megakv.weights.formats import settings
from megakv.weights.placement.heads import contiguous_head_map

MOST_TOKENS = 10**9
MOST_GPUS = 10**6
MOST_SEQUENCES = 10**5


@dataclass(frozen=True)
class Demand:
    """What is asked of the machines. Raises ValueError, naming the size, its value and what is allowed."""

    context: int  # New tokens T of every sequence.
    gpus: int  # Accelerators there are.
    cached: int = 0  # Tokens P of every sequence that are cached already.
    batch: int = 1  # Sequences that one replica of the model serves at a time.
    new_tokens: int = 0  # Tokens generated for every sequence, which memory must hold.
    slo_ttft_s: float | None = None  # Longest time to first token.
    lossy: bool = False  # Whether FP8 weights may be chosen, and compressed caches where nothing else fits.
    # What is best: the first token soonest, or most tokens per second of all replicas, generated ones if there are any.
    objective: Objective = "latency"

    def __post_init__(self) -> None:
        allowed = {
            "context": (self.context, 1, MOST_TOKENS),
            "cached": (self.cached, 0, MOST_TOKENS),
            "batch": (self.batch, 1, MOST_SEQUENCES),
            "new-tokens": (self.new_tokens, 0, MOST_TOKENS),
            "gpus": (self.gpus, 1, MOST_GPUS),
        }
        for name, (value, low, high) in allowed.items():
            if not low <= value <= high:
                raise ValueError(f"--{name} {value}: allowed: {low} to {high:,}")
        if self.slo_ttft_s is not None and not 0 < self.slo_ttft_s < math.inf:
            raise ValueError(f"--slo-ttft {self.slo_ttft_s}: allowed: seconds above 0")

    @property
    def total(self) -> int:
        return self.context + self.cached

    @property
    def longest(self) -> int:
        return self.total + self.new_tokens


@dataclass(frozen=True)
class Mesh:
    """Context-parallel x tensor-parallel ranks of one replica, and how many replicas there are."""

    cp_size: int
    tp_size: int
    replicas: int

    @property
    def ranks(self) -> int:
        return self.cp_size * self.tp_size

    def __str__(self) -> str:
        return f"CP{self.cp_size} x TP{self.tp_size}"


@dataclass(frozen=True)
class Fit:
    """How a model is made to fit."""

    fp8: bool = False  # Row-wise FP8 weights in feed-forward layers.
    offload: bool = False  # Keys and values in host memory.
    weights: bool = False  # With it: weights of decoder layers in host memory, too.
    groups: int = 1  # With it: those of a batch that each layer takes one behind the other.
    kept_share: float = 1.0  # What part of a prompt's keys and values compression keeps.

    @property
    def exact(self) -> bool:
        return not self.fp8 and self.kept_share == 1.0

    def __str__(self) -> str:
        words = ["FP8 feed-forward"] * self.fp8 + ["offloaded KV"] * self.offload + ["offloaded weights"] * self.weights
        words += [f"{self.groups} groups"] * (self.groups > 1)
        if self.kept_share < 1:
            words.append(f"KV budget {self.kept_share:g}")
        return ", ".join(words)


@dataclass(frozen=True)
class Choice:
    """One way to serve a demand, and what it is predicted to cost."""

    mesh: Mesh
    fit: Fit
    prefill: str  # Methods.
    decode: str
    memory: RankMemory  # Of the fullest rank.
    ttft_s: float  # Times to first and to each further token.
    ttit_s: float
    terms: dict[str, float] = field(default_factory=dict)  # What the time to first token goes to.
    partition: Partition | None = None  # Of ``runahead``.
    chunk_tokens: int = 0  # Of ``runahead``.
    mapping: HeadMapping | None = None  # Of KV heads on ranks; None: heads in runs of neighbours.
    mapping_gain: float | None = None  # How much faster a token is by the best mapping; None where none was looked for.

    @property
    def heads(self) -> str | None:
        """How they are placed, where a mapping was looked for."""
        if self.mapping_gain is None:
            return None
        return "contiguous" if self.mapping is None else f"mapped, {self.mapping_gain:.3f} x as fast"

    def prompt_tokens_per_s(self, demand: Demand) -> float:
        """Of all replicas together, as `new_tokens_per_s`."""
        return self.mesh.replicas * demand.batch * demand.context / self.ttft_s

    def new_tokens_per_s(self, demand: Demand) -> float:
        return self.mesh.replicas * demand.batch / self.ttit_s

    def tokens_per_s(self, demand: Demand) -> float:
        """What a demand's objective of throughput counts."""
        generated = demand.objective == "throughput" and demand.new_tokens > 0
        return self.new_tokens_per_s(demand) if generated else self.prompt_tokens_per_s(demand)

    def __str__(self) -> str:
        fit = str(self.fit)
        return f"{self.mesh} {self.prefill}" + (f" ({fit})" if fit else "")


@dataclass(frozen=True)
class Rejection:
    what: str
    why: str


def tp_sizes(model: ModelShape, gpus: int) -> list[int]:
    """Tensor-parallel degrees that divide a model's heads."""
    sizes = []
    for size in range(1, min(model.heads, gpus) + 1):
        try:
            contiguous_head_map(1, model.heads, model.kv_heads, size)
        except ValueError:
            continue
        sizes.append(size)
    return sizes


def meshes(model: ModelShape, demand: Demand) -> Iterator[Mesh]:
    """Meshes for some accelerators: for every TP degree, powers of two of CP ranks and as many as there can be."""
    for tp_size in tp_sizes(model, demand.gpus):
        most = min(demand.gpus // tp_size, demand.total)
        for cp_size in sorted({most, *(1 << level for level in range(most.bit_length()))}):
            yield Mesh(cp_size, tp_size, demand.gpus // (cp_size * tp_size))


def choice_config(
    choice: Choice,
    machine: Hardware,
    model: ModelShape,
    objective: Objective = "latency",
    mapping: str | None = None,
) -> dict[str, Any]:
    """The JSON of a run that makes a choice for an objective, as `megakv.engine.config.load_config` takes it.

    mapping: the file that the mapping of a choice which has one is saved to.
    """
    parallel: dict[str, Any] = {"size": choice.mesh.cp_size}
    section: dict[str, Any] = {"context_parallel": parallel}
    if choice.mesh.cp_size > 1:
        parallel |= {"prefill": choice.prefill, "decode": choice.decode}
    if choice.partition is not None:
        whole = sum(choice.partition)
        shares = [part / whole for part in choice.partition]
        section["runahead"] = {"partition": shares, "chunk_tokens": choice.chunk_tokens}
    if choice.fit.fp8:
        section["weights"] = {"format": "fp8"}
    elif model.packed is not None and model.packed.name in settings():
        section["weights"] = {"format": model.packed.name}
    if choice.fit.kept_share < 1:
        section["fairkv"] = {"budget": choice.fit.kept_share}
        if choice.mapping is not None:
            section["fairkv"]["mapping"] = mapping
    if choice.fit.offload:
        # Whether some tokens may be recomputed from activations, or attended to by the host.
        divided = recomputes(model, tp_size=choice.mesh.tp_size) or machine.spec.host_memory_bandwidth is not None
        divided &= choice.fit.kept_share == 1
        host_gb = max(1.0, round(choice.memory.host / GIB + 0.5))
        section["offload"] = {"enabled": True, "host_gb": host_gb, "method": "auto" if divided else "stream"}
        if objective != "latency":
            section["offload"]["objective"] = objective
        if choice.memory.disk:
            section["offload"]["disk_gb"] = float(round(choice.memory.disk / GIB + 0.5))
        # What was predicted is named, so that it is obeyed.
        if choice.fit.weights:
            section["offload"]["weights"] = True
        if choice.fit.groups > 1 or objective == "throughput":
            section["offload"]["num_gpu_batches"] = choice.fit.groups
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    dtype = names[machine.spec.dtype]
    return {"dtype": dtype, "tensor_parallel": {"tp_size": choice.mesh.tp_size}, "megakv": section}
