"""A rehearsal of the CUDA path without a GPU: every path of the library on fake tensors that know their device.

Usage: cuda_rehearsal.py [--json FILE] [--only NAME]. Started by cuda_rehearsal.sh. For each
path, a prompt is read and some tokens are decoded on one rank of a world whose other ranks do nothing (torch's
``fake`` process group). It is found out whether tensors of two devices met, and where the host waited for the device:
see `fake_cuda.py`. Nothing is said of numbers or times, nor of beams, which transformers steers by what it computed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from fake_cuda import DEVICE, FakeCuda, Wait, fake_cuda
from families import FAMILIES
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

import megakv
from megakv.base.sections import registered
from megakv.distributed.mesh import stop_distributed
from megakv.fairkv.methods import METHODS as COMPRESSION
from megakv.forward.config import ContextParallelConfig
from megakv.launcher.process import quiet_libraries
from megakv.offload.config import OffloadConfig

STEPS, BATCH = 6, 3
"""Tokens, of which the last one is looked at: steps that are captured are by then; and sequences."""
PATIENCE_S = 5.0
"""After which a path that failed is left: ranks that are not there acknowledge nothing."""
WRONG_DEVICE = "found two different devices"


@dataclass(frozen=True)
class Way:
    """One way through the library.

    Parameters
    ----------
    name : str
    section : dict
        Of the JSON under ``megakv``.
    family : str
        Of the model.
    ranks, rank, tp : int
        World, this rank in it, and tensor-parallel degree.
    options : dict
        Of `generate`.
    dtype : torch.dtype
        Of the model.
    most : int
        Waits of a step that it comes with.
    captured : bool
        Whether steps are to be CUDA graphs.
    """

    name: str
    section: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    ranks: int = 1
    rank: int = 0
    tp: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    most: int = 1
    captured: bool = False


class Steps(LogitsProcessor):
    """Where in the list of waits each token's logits were there; the model ends after some."""

    def __init__(self, cuda: FakeCuda):
        self._cuda = cuda
        self.marks: list[int] = []
        self.varlen: list[int] = []
        cuda.truth = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.marks.append(len(self._cuda.waits))
        self.varlen.append(self._cuda.varlen)
        self._cuda.truth = len(self.marks) > STEPS
        return scores


def allowed(model: Any, key: str) -> list[str]:
    """The methods that a setting may name."""
    return [value for value in registered(model, "")[f".{key}"] if value != "auto"]


def write_importance(folder: str) -> str:
    """A file of importances for HeadKV, which all heads share alike."""
    config, path = FAMILIES["llama"](), Path(folder, "importance.json")
    path.write_text(json.dumps({"importance": [[1.0] * config.num_key_value_heads] * config.num_hidden_layers}))
    return str(path)


def paths(folder: str) -> Iterator[Way]:
    """All of them."""
    yield Way("one rank", captured=True)
    yield Way("one rank, sampling", options={"do_sample": True}, captured=True)
    yield Way("one rank, window", family="mistral")
    yield Way("one rank, soft cap and window", family="gemma2")
    yield Way("one rank, ALiBi", family="bloom")
    for rank in (0, 1):
        for method in allowed(ContextParallelConfig, "prefill"):
            section = {"context_parallel": {"size": 3, "prefill": method}}
            yield Way(f"CP {method}, rank {rank}", section, ranks=3, rank=rank)
        for method in allowed(ContextParallelConfig, "decode"):
            section = {"context_parallel": {"size": 3, "decode": method}}
            yield Way(f"CP decode {method}, rank {rank}", section, ranks=3, rank=rank)
    for rank in (0, 2):
        section = {"context_parallel": {"size": 3, "prefill": "runahead"}, "runahead": {"kv": "last"}}
        yield Way(f"CP runahead, kv last, rank {rank}", section, ranks=3, rank=rank)
    section = {"context_parallel": {"size": 3, "prefill": "pass_kv"}}
    yield Way("CP pass_kv, window", section, family="mistral", ranks=3, rank=1)
    yield Way("TP", ranks=2, rank=1, tp=2, captured=True)
    yield Way("CP x TP", {"context_parallel": {"size": 2}}, ranks=4, rank=3, tp=2)
    for method in COMPRESSION:
        section: dict[str, Any] = {"fairkv": {"method": method, "budget": 40, "min_tokens": 48}}
        if method == "headkv":
            section["fairkv"]["importance"] = write_importance(folder)
        yield Way(f"compression {method}", section)
    # By another kernel.
    yield Way("compression in float32", {"fairkv": {"budget": 40, "min_tokens": 48}}, dtype=torch.float32)
    yield Way(
        "compression on CP",
        {"context_parallel": {"size": 2}, "fairkv": {"budget": 40, "min_tokens": 48}},
        ranks=2,
        rank=1,
    )
    for method in allowed(OffloadConfig, "method"):
        offload = {"enabled": True, "host_gb": 0.01, "page_kib": 8, "chunk_tokens": 16, "method": method}
        # Its queries go to the host, layer by layer.
        most = 1 + FAMILIES["llama"]().num_hidden_layers * (method in ("cpu_rank", "all"))
        yield Way(f"offload {method}", {"offload": offload}, most=most)
    offload = {"enabled": True, "host_gb": 0.0002, "disk_gb": 0.01, "disk_path": folder, "page_kib": 8}
    yield Way("offload to disk", {"offload": {**offload, "method": "stream"}})
    offload = {"enabled": True, "host_gb": 0.01, "page_kib": 8, "weights": True, "method": "stream"}
    yield Way("offload with weights", {"offload": offload})


def rehearse(path: Way, cuda: FakeCuda) -> dict[str, Any]:
    """What one path comes to."""
    os.environ.update(RANK=str(path.rank), WORLD_SIZE=str(path.ranks))
    steps, error = Steps(cuda), ""
    cuda.waits.clear()
    cuda.graphs.clear()
    try:
        dist.init_process_group("fake", rank=path.rank, world_size=path.ranks, store=FakeStore())
        model = AutoModelForCausalLM.from_config(FAMILIES[path.family](), dtype=path.dtype)
        config = {
            "dtype": {torch.bfloat16: "bf16", torch.float32: "fp32"}[path.dtype],
            "tensor_parallel": {"tp_size": path.tp},
            "megakv": {"timeout_s": PATIENCE_S, **path.section},
        }
        engine = megakv.init_inference(model, config)
        ids = torch.randint(3, 100, (BATCH, 64)).to(DEVICE)
        cuda.waits.clear()
        processors = LogitsProcessorList([steps])
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 9, **path.options}
        engine.generate(ids, logits_processor=processors, **options)
        engine.destroy()
        if len(steps.marks) < STEPS:
            error = f"only {len(steps.marks)} tokens were generated"
    except Exception as problem:
        error = "".join(traceback.format_exception(problem))
    finally:
        stop_distributed()
    graphs = [graph for graph in cuda.graphs if graph.replays]
    broken = [what for graph in cuda.graphs for what in graph.broken]
    if not error and (broken or bool(graphs) != path.captured):
        error = f"graphs: {len(graphs)}, of which there should be {'some' if path.captured else 'none'}; {broken}"
    marks, varlen = ([*each, *[0] * STEPS] for each in (steps.marks, steps.varlen))
    step = Counter(cuda.waits[marks[STEPS - 2] : marks[STEPS - 1]]) if len(steps.marks) >= STEPS else Counter()
    own = {wait: count for wait, count in step.items() if wait.place.startswith("megakv/")}
    return {
        "path": path.name,
        "wrong_devices": int(WRONG_DEVICE in error),
        "error": error,
        "waits_per_step": sum(own.values()),
        "most": path.most,
        "captured": [len(graph.held) for graph in graphs],
        "collectives_captured": sum("allreduce" in name for graph in graphs for name, _ in graph.held),
        "varlen_calls": varlen[STEPS - 1] - varlen[STEPS - 2],
        "waits_of_transformers": sum(step.values()) - sum(own.values()),
        "where": _shown(step),
        "waits_of_the_prompt": marks[0],
        "where_of_the_prompt": _shown(Counter(cuda.waits[: marks[0]])),
    }


def _shown(waits: Counter[Wait]) -> list[dict[str, Any]]:
    return [{"place": w.place, "operation": w.operation, "times": count} for w, count in sorted(waits.items(), key=str)]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [f"{'path':34} {'devices':>8} {'per step':>9} {'transformers':>13} {'prompt':>7} {'varlen':>7}"]
    for row in rows:
        devices = "wrong" if row["wrong_devices"] else "failed" if row["error"] else "right"
        counts = f"{row['waits_per_step']:9} {row['waits_of_transformers']:13} {row['waits_of_the_prompt']:7}"
        counts += f" {row['varlen_calls']:7}"
        lines.append(f"{row['path']:34} {devices:>8} {counts}")
        lines += [f"    {w['times']} x {w['operation']} at {w['place']}" for w in row["where"]]
        lines += ["    " + row["error"].strip().splitlines()[-1]] if row["error"] else []
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--only", default="", help="paths whose name has this in it")
    parser.add_argument("--traceback", action="store_true", help="show where a path failed")
    arguments = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, fake_cuda() as cuda:
        for path in paths(folder):
            if arguments.only in path.name:
                rows.append(rehearse(path, cuda))
                print(table(rows[-1:]).split("\n", 1)[1] if len(rows) > 1 else table(rows), flush=True)
                if arguments.traceback and rows[-1]["error"]:
                    print(rows[-1]["error"])
    if arguments.json is not None:
        versions = {module.__name__: module.__version__ for module in (torch, transformers, deepspeed)}
        arguments.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(any(row["error"] or row["waits_per_step"] > row["most"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
