"""Plan of `offload.py`: its parts, their cases, and the names of its methods."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megakv.costmodel.shape import ModelShape

IN_MEMORY, OTHERS = "in_memory", "transformers"
CHOICES = ("stream", "kvpr", "chunked", "cpu_rank")  # What `auto` chooses from
ROW, FOUR_BITS, COARSE, QUARTER = "row_", "_4bit", "_coarse", "_quarter"
SCHEDULES = {"_one": ", row by row", "_columns": ", column by column", "_chosen": ", as chosen"}
"""A whole batch row by row, in a case's groups column by column, or as ``megakv.offload.objective`` chooses."""
NAMES = {
    IN_MEMORY: "in memory", OTHERS: "transformers offloaded", "stream": "streaming", "kvpr": "KVPR",
    "chunked": "KVPR, chunked", "cpu_rank": "CPU rank", "auto": "auto",
}  # fmt: skip
PARTS = {
    "links": "every method over links of several bandwidths; Figure 12",
    "long": "every method at a long context with few KV heads (--gpu)",
    "latency": "weights resident: Tables 3 and 4, Figure 7",
    "llama": "the same for a Llama with as many KV heads as query heads: Figure 13",
    "throughput": "weights offloaded, column-by-column: Table 5, Figures 6 (first row), 8, 9, 10",
    "batches": "the same by batch size: Figure 6 (second row)",
    "hiding": "weights offloaded, a small cache, row-by-row: Table 2",
    "beams": "weights offloaded, two beams of each sequence: nothing is brought ahead of a step",
    "disk": "host memory holds a part of the cache, and a disk slower than the link the rest",
    "windows": "three of four layers have a sliding window, an eighth of the prompt",
    "objective": "the same batch row by row and column by column, and as the objective of throughput chooses",
    "budget": "a quarter of a prompt's keys and values is kept, beside all of them",
}
PAGE_KIB = 512
DISK_SHARE = 0.5  # Of a link's bandwidth, what the disk behind it gives
LARGE = {
    "opt-6.7b": "opt_6_7b", "opt-13b": "opt_13b", "opt-30b": "opt_30b", "llama-2-7b": "llama2_7b",
    "llama-3-8b": "llama3_8b",
}  # fmt: skip
"""Published models, and the recipes that have their sizes."""
WINDOWED, WINDOW = "windowed", 128
SMALL = {"opt": "opt", "mha": "llama", "gqa": "llama", WINDOWED: "qwen3"}
"""Sizes on the command line: OPT, a Llama like it, one with a KV head for four query heads, a Qwen3 with windows."""


@dataclass(frozen=True)
class Variant:
    """Meaning of a method's name."""

    method: str  # Of ``megakv.offload``, or `IN_MEMORY`, or `OTHERS`
    rows: bool  # Whether the groups of a case are decoded one after the other, in calls of their own
    kv_bits: Literal[4] | None  # Of keys and values off the accelerator; lossy
    coarse: bool  # Whether recomputation waits for all weights of a layer's attention (Figure 5a)
    schedule: str = ""  # Of `SCHEDULES`, or nothing
    budget: float | None = None  # What part of a prompt's keys and values compression keeps; lossy

    @property
    def lossy(self) -> bool:
        return self.kv_bits is not None or self.budget is not None

    @property
    def title(self) -> str:
        title = ("row-by-row " if self.rows else "") + NAMES[self.method] + ", 4 bits (lossy)" * bool(self.kv_bits)
        title += f", {self.budget:.0%} kept (lossy)" if self.budget else ""
        return title + SCHEDULES.get(self.schedule, "") + " without hiding" * self.coarse

    def groups(self, case: Case) -> int | None:
        """``num_gpu_batches`` of a case; None where that is left to the objective."""
        if self.schedule == "_chosen":
            return None
        return 1 if self.rows or self.schedule == "_one" else case.groups


def variant(name: str) -> Variant:
    """Read a method's name, such as ``row_stream``, ``kvpr_4bit`` or ``kvpr_coarse``."""
    method, budget = name.removeprefix(ROW), 0.25 if name.endswith(QUARTER) else None
    schedule = next((ending for ending in SCHEDULES if name.endswith(ending)), "")
    for ending in (FOUR_BITS, COARSE, QUARTER, schedule):
        method = method.removesuffix(ending)
    bits = 4 if name.endswith(FOUR_BITS) else None
    return Variant(method, name.startswith(ROW), bits, name.endswith(COARSE), schedule, budget)


@dataclass(frozen=True)
class Case:
    """Methods that are measured side by side, in turns, in one setting."""

    part: str
    model: str
    batch: int  # Sequences, tokens of each prompt, and tokens to generate
    prompt: int
    new: int
    link_gb_s: float | None  # Of the emulated link; None for the accelerator's own
    methods: tuple[str, ...]
    weights: bool = False  # Whether decoder layers' weights are offloaded too
    beams: int = 1  # Of each sequence: where there are several, a step begins with nothing on its way
    groups: int = 1  # Of the batch, column-by-column
    in_memory: float | None = None  # Share of keys and values that host memory has room for, a disk the rest; None: all

    @property
    def name(self) -> str:
        link = "" if self.link_gb_s is None else f"-{self.link_gb_s:g}gb"
        size = f"b{self.batch}x{self.groups}-p{self.prompt}-n{self.new}" + (f"-k{self.beams}" if self.beams > 1 else "")
        return f"{self.part}-{self.model}-{size}{link}"

    @property
    def disk_gb_s(self) -> float | None:
        """Bandwidth of the disk, in GB/s; None without one."""
        return None if self.in_memory is None or self.link_gb_s is None else DISK_SHARE * self.link_gb_s

    def cache_bytes(self, shape: ModelShape) -> int:
        """Keys and values of all layers, prompts and new tokens."""
        return self.batch * self.beams * (self.prompt + self.new) * len(shape.layers) * shape.attention().kv_row_bytes

    def host_bytes(self, shape: ModelShape) -> int:
        """Host memory that any of its methods needs: keys, values, activations, and weights if they are offloaded."""
        from megakv.costmodel.stored_rows import page_bytes

        page, layers = PAGE_KIB << 10, len(shape.layers)
        widths = shape.attention().kv_row_bytes, shape.hidden * shape.element_bytes
        # One page more for each sequence: while it grows, and for what the link is measured with.
        paged = sum(page_bytes(self.prompt + self.new, width, page) + page for width in widths)
        weights = layers * shape.layers[0].dense * shape.element_bytes if self.weights else 0
        return paged * self.batch * self.beams * layers + int(1.02 * weights) + (64 << 20)


@dataclass(frozen=True)
class Plan:
    """The cases of a part: all combinations."""

    methods: tuple[str, ...]
    models: tuple[str, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    news: tuple[int, ...]
    links: str = "middle"  # Which of the links asked for
    weights: bool = False
    group: int | None = None  # Sequences of a group, column-by-column
    beams: tuple[int, ...] = (1,)
    in_memory: float | None = None  # As of `Case`


_ALL = (IN_MEMORY, OTHERS, *CHOICES, "auto", "stream_4bit")
_LATENCY = (OTHERS, *CHOICES, "auto")
_COLUMNS = ("row_stream", *CHOICES, "auto", "stream_4bit", "kvpr_4bit")
_BATCHES, _HIDING = ("stream", "kvpr", "auto"), ("stream", "kvpr_coarse", "kvpr")
_COLUMN = {"links": "last", "weights": True}
FULL = {
    "links": Plan(_ALL, ("opt", "gqa"), (4,), (256,), (20,), links="all"),
    "latency": Plan(_LATENCY, ("opt",), (2,), (128, 256, 512), (12, 32)),
    "llama": Plan(_LATENCY, ("mha",), (2,), (128, 256, 512), (12,)),
    "throughput": Plan(_COLUMNS, ("opt",), (8,), (128, 256, 512), (9,), group=2, **_COLUMN),
    "batches": Plan(_BATCHES, ("opt",), (4, 8, 16), (128,), (9,), group=2, **_COLUMN),
    "hiding": Plan(_HIDING, ("opt",), (1, 2, 4), (64,), (12,), **_COLUMN),
    "beams": Plan(_HIDING, ("opt",), (4,), (128, 256, 384), (12,), beams=(2,), **_COLUMN),
    "disk": Plan((IN_MEMORY, *_LATENCY), ("opt", "gqa"), (4,), (256,), (20,), in_memory=0.75),
    "windows": Plan((IN_MEMORY, *_LATENCY), (WINDOWED,), (4,), (8 * WINDOW,), (20,)),
    "objective": Plan(
        tuple(f"stream{end}" for end in SCHEDULES), ("opt",), (8,), (32, 256), (16,), group=2, beams=(1, 2)
    ),
    "budget": Plan((IN_MEMORY, "stream", "stream_quarter"), ("mha",), (2,), (1024, 2048), (20,)),
}
_LESS: dict[str, dict[str, Any]] = {
    "links": {"news": (14,)},
    "latency": {"prompts": (128, 256), "news": (12,)},
    "llama": {"prompts": (128, 256)},
    "throughput": {"prompts": (128,), "news": (6,)},
    "batches": {"batches": (4, 8), "news": (6,)},
    "hiding": {"batches": (1, 4), "news": (6,)},
    "beams": {"prompts": (256,), "news": (6,)},
    "objective": {"batches": (4,), "prompts": (32,), "news": (8,)},
    "disk": {"models": ("opt",), "batches": (2,), "news": (6,)},
}
QUICK = {part: replace(FULL[part], **less) for part, less in _LESS.items()}
GPU = {
    "links": Plan(_ALL, ("opt-6.7b",), (64,), (512,), (32,)),
    "long": Plan(_ALL, ("llama-3-8b",), (8,), (32768,), (32,)),
    "latency": Plan(_LATENCY, ("opt-6.7b",), (64,), (128, 256, 512), (32, 128)),
    "llama": Plan(_LATENCY, ("llama-2-7b",), (64,), (256, 512), (32,)),
    "throughput": Plan(_COLUMNS, ("opt-13b",), (128,), (256,), (32,), group=32, weights=True),
    "batches": Plan(_BATCHES, ("opt-13b",), (32, 64, 128), (256,), (32,), group=32, weights=True),
    "hiding": Plan(_HIDING, ("opt-6.7b",), (1, 4, 16, 32), (256,), (64,), weights=True),
}


def plans(arguments: argparse.Namespace) -> Mapping[str, Plan]:
    """By part, before the command line narrows them."""
    return GPU if arguments.gpu else QUICK if arguments.quick else FULL


def _some(methods: tuple[str, ...], asked: Sequence[str] | None) -> tuple[str, ...]:
    return methods if asked is None else tuple(name for name in methods if name in asked)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """All that is asked for, part by part; lists on the command line take the place of every part's own."""
    found = []
    for part in arguments.only:
        plan = plans(arguments)[part]
        links = arguments.links
        if plan.links != "all":
            links = [links[-1] if plan.links == "last" else links[len(links) // 2]]
        group = plan.group and (arguments.group or plan.group)
        found += [
            Case(
                part, model, batch, prompt, new, link, _some(plan.methods, arguments.methods), plan.weights,
                beams=beams, groups=batch // group if group else 1, in_memory=plan.in_memory,
            )
            for link in links
            for model in arguments.shapes or plan.models
            for batch in arguments.batch or plan.batches
            for prompt in arguments.prompt or plan.prompts
            for new in arguments.new or plan.news
            for beams in plan.beams
        ]  # fmt: skip
    return found
