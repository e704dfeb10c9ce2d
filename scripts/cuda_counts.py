"""Operations that reach a GPU in a prompt and in a step of decoding, beside plain transformers', without a GPU.

Usage: cuda_counts.py [--json FILE] [--batches 1,4]. On the fake device of `fake_cuda.py`, in any environment of
MegaKV with a C++ compiler. A model of two decoder layers and one of three tell what a layer adds, and what is around
layers; from that, `--layers` of them. Counted is what PyTorch gives a device to do: an operation may be several
kernels, but the same ones on both sides. Of a CUDA graph the operations in it are counted, as the device has to do
them all the same. Where the host waits for the device, and how many bytes go up and down in a step, is counted in the
same runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.update(DS_ACCELERATOR="cuda", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")

import torch
import torch.distributed as dist
import transformers
from fake_cuda import DEVICE, FakeCuda, fake_cuda
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessor, LogitsProcessorList

import megakv
from megakv.attention import backends, prompts, varlen
from megakv.distributed.mesh import stop_distributed
from megakv.launcher.process import quiet_libraries

PLAIN, KERNELS, GRAPHS = METHODS = ("transformers", "uncaptured", "captured")
PROMPT, STEPS = 64, 8
"""Tokens of every sequence, and steps of which the last one is counted: graphs are captured in the third."""
LEAST, MOST = 2, 3
"""Layers of the two models."""
PATIENCE_S = 5.0
BARS = {"per_layer": {"prefill": 1.15, "decode": 1.0}, "operations": {"prefill": 1.15, "decode": 1.01}}
"""Operations over transformers', at most: of a layer, and of all of them with what is around."""


class Count(NamedTuple):
    """What a pass gave the device to do."""

    operations: Counter[tuple[str, str]]
    waits: int
    bytes_up: int
    bytes_down: int

    @property
    def total(self) -> int:
        """Operations of all kinds."""
        return sum(self.operations.values())


class Marks(LogitsProcessor):
    """Counts where each token's logits were there; the model ends after `STEPS`."""

    def __init__(self, cuda: FakeCuda):
        self._cuda = cuda
        cuda.truth = False
        self.found = [self._now()]

    def _now(self) -> Count:
        cuda = self._cuda
        return Count(cuda.operations.copy(), len(cuda.waits), cuda.bytes_up, cuda.bytes_down)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.found.append(self._now())
        self._cuda.truth = len(self.found) > STEPS
        return scores

    def between(self, mark: int) -> Count:
        """From one token's logits to those of the next; from the start to the first's for 0."""
        before, after = self.found[mark], self.found[mark + 1]
        numbers = (new - old for new, old in zip(after[1:], before[1:], strict=True))
        return Count(after.operations - before.operations, *numbers)


def shape(layers: int) -> LlamaConfig:
    """A small Llama, whose head dimension suits every kernel."""
    return LlamaConfig(
        vocab_size=199, hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=352, eos_token_id=None,
    )  # fmt: skip


def counted(cuda: FakeCuda, method: str, layers: int, batch: int, section: dict[str, Any]) -> dict[str, Count]:
    """A prompt's and a step's."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    cuda.graphs.clear()
    try:
        model: Any = AutoModelForCausalLM.from_config(shape(layers), dtype=torch.bfloat16).eval()
        if method == PLAIN:
            model.to(DEVICE)
        else:
            settings = {"dtype": "bf16", "enable_cuda_graph": None if method == GRAPHS else False, "megakv": section}
            model = megakv.init_inference(model, settings)
        ids = torch.randint(3, 100, (batch, PROMPT)).to(DEVICE)
        marks = Marks(cuda)
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": STEPS + 4}
        with torch.no_grad():
            model.generate(ids, logits_processor=LogitsProcessorList([marks]), **options)
        if method != PLAIN:
            model.destroy()
    finally:
        stop_distributed()
    prompt, step = marks.between(0), marks.between(STEPS - 1)
    if method == GRAPHS:
        held, *others = [graph for graph in cuda.graphs if graph.replays]
        assert not others and not held.broken, held.broken
        inside = Counter({("graph", ""): -1}) + Counter(
            {(name, "graph"): count for name, count in _names(held).items()}
        )
        launched = Counter({key: count for key, count in step.operations.items() if key[0] != "graph"})
        step = step._replace(operations=launched + inside)
    return {"prefill": prompt, "decode": step}


def _names(graph: Any) -> Counter[str]:
    return Counter(name for name, _ in graph.held)


def measure(cuda: FakeCuda, batches: list[int], layers: int) -> list[dict[str, Any]]:
    """Rows of all methods, for prompts and steps."""
    rows = []
    for batch in batches:
        found = {
            method: {depth: counted(cuda, method, depth, batch, {"timeout_s": PATIENCE_S}) for depth in (LEAST, MOST)}
            for method in METHODS
        }
        for stage in BARS["per_layer"]:
            for method, by_depth in found.items():
                less, more = by_depth[LEAST][stage], by_depth[MOST][stage]
                layer = more.total - less.total
                rows.append({
                    "stage": stage, "batch": batch, "method": method, "per_layer": layer,
                    "around": less.total - LEAST * layer, "layers": layers,
                    "operations": less.total + (layers - LEAST) * layer, "waits": less.waits,
                    "bytes_up": less.bytes_up, "bytes_up_per_layer": more.bytes_up - less.bytes_up,
                    "bytes_down": less.bytes_down,
                    "by_name": _by_name(more.operations, less.operations, -1),
                    "around_by_name": _by_name(less.operations, more.operations - less.operations, -LEAST),
                })  # fmt: skip
    return rows


def _by_name(some: Counter[tuple[str, str]], others: Counter[tuple[str, str]], factor: int) -> dict[str, int]:
    """Operations of some, and of others so many times, by name and place."""
    found = Counter[str]()
    for operations, times in ((some, 1), (others, factor)):
        for (name, place), count in operations.items():
            found[f"{name} at {place}"] += times * count
    return {name: count for name, count in sorted(found.items()) if count}


def ratios(rows: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """Operations of each method over transformers', of a kind of `BARS`."""
    plain = {(row["stage"], row["batch"]): row[kind] for row in rows if row["method"] == PLAIN}
    return {
        f"{row['stage']}.{row['batch']}.{row['method']}": row[kind] / plain[row["stage"], row["batch"]]
        for row in rows
        if row["method"] != PLAIN
    }


def over_bars(rows: list[dict[str, Any]]) -> list[str]:
    """What is above what it may be, in words."""
    return [
        f"{name}: {ratio:.3f} times transformers' operations, {kind}; allowed: {bars[name.partition('.')[0]]}"
        for kind, bars in BARS.items()
        for name, ratio in ratios(rows, kind).items()
        if ratio > bars[name.partition(".")[0]]
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    found = ratios(rows, "operations")
    title = f"{'stage':8} {'batch':>5} {'method':13} {'a layer':>7} {'around':>6} {'in all':>6} {'over':>6}"
    lines = [f"{title} {'waits':>5} {'bytes up':>8} {'down':>6}"]
    for row in rows:
        over = found.get(f"{row['stage']}.{row['batch']}.{row['method']}", 1.0)
        lines.append(
            f"{row['stage']:8} {row['batch']:5} {row['method']:13} {row['per_layer']:7} {row['around']:6} "
            f"{row['operations']:6} {over:6.3f} {row['waits']:5} {row['bytes_up']:8} {row['bytes_down']:6}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write what was counted")
    parser.add_argument("--batches", default="1,4,16", help="sequences")
    parser.add_argument("--layers", type=int, default=32, help="decoder layers that the ratios are of")
    parser.add_argument("--names", action="store_true", help="show the operations of a layer, and around layers")
    arguments = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    checked = [(backends, "_agrees"), (varlen, "_agrees"), (prompts, "_agrees")]
    with fake_cuda() as cuda, contextlib.ExitStack() as stack:
        for module, name in checked:
            # Once in a process each kernel is tried.
            stack.enter_context(mock.patch.object(module, name, lambda *case: True))
        rows = measure(cuda, [int(batch) for batch in arguments.batches.split(",")], arguments.layers)
    print(table(rows))
    for row in rows if arguments.names else []:
        shown = {name: row[name] for name in ("by_name", "around_by_name")}
        print(row["stage"], row["batch"], row["method"], json.dumps(shown, indent=1))
    if arguments.json is not None:
        versions = {module.__name__: module.__version__ for module in (megakv, torch, transformers)}
        summary = {**{f"{kind}_over_transformers": ratios(rows, kind) for kind in BARS}, "bars": BARS}
        given = {"batches": arguments.batches, "layers": arguments.layers}
        document = {"benchmark": "cuda_counts", "machine": {"accelerator": "fake"}, "versions": versions, "args": given}
        arguments.json.write_text(json.dumps({**document, "rows": rows, "summary": summary}, indent=1) + "\n")
    for words in (above := over_bars(rows)):
        print(words)
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
