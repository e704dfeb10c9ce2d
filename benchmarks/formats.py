"""Weights in 4 and 8 bits beside bfloat16: memory, first token and further ones, and llama.cpp's with the same file.

A random model of a 1B model's width, few layers of it, in bfloat16 and in several types of GGUF's blocks, and
SmolLM2-135M-Instruct from the file that it is published as. Everything waits asleep for its turn; llama.cpp is built
for this machine by ``bash benchmarks/rivals.sh llama_cpp llama_native``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness.document import model_folder
from harness.launch import Found, Rows, Summary, benchmark_alone
from harness.links import ROOT
from harness.options import Options
from harness.publish import show, show_summary
from harness.rivals import CORES, Turn, Worker, gguf
from harness.statistics import median, ratio
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig

import megakv
from megakv.base.errors import MegaKVError

PLAIN, KINDS, SMALL = "BF16", ("Q4_1", "Q8_0", "Q4_K"), "Q4_1"
OWN, NATIVE = "megakv", "llama_native"
MEASURES = {"ttft": "seconds", "ttit": "ttit_s"}
SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "short prompts, two layers, two rounds: less than 8 minutes")
    options.names("--kinds", KINDS, ",".join(KINDS), "types of blocks")
    options.numbers("--lengths", {"": "128,4K", "quick": "128,512"}, "tokens of the prompts")
    options.add("--layers", {"": 4, "quick": 2}, "layers of the random model; a 1B model has 16")
    options.add("--vocab", 32_000, "tokens that the random model knows")
    options.add("--new-tokens", {"": 32, "quick": 16}, "tokens after the first, whose median time is the TTIT")
    options.add("--repeats", {"": 5, "quick": 2}, "rounds of all at each length")
    options.add("--requests", {"": 40, "quick": 6}, "prompts whose tokens are compared with unpacked float32 weights'")
    arguments = options.parse(argv)
    if len(os.sched_getaffinity(0)) < CORES:
        options.error(f"this process may use one core; it needs {CORES}")
    return arguments


def files(arguments: argparse.Namespace, folder: Path, not_run: dict[str, str]) -> dict[tuple[str, str], Path]:
    """GGUF files by model and type."""
    sys.path.append(str(ROOT))
    from tests.gguf_files import write_gguf

    positions = max(arguments.lengths) + arguments.new_tokens + 64
    sizes = {"num_hidden_layers": arguments.layers, "vocab_size": arguments.vocab, "max_position_embeddings": positions}
    config = LlamaConfig(**SHAPE, **sizes, eos_token_id=None, pad_token_id=None)
    found = {("1B wide", kind): write_gguf(folder / f"{kind}.gguf", config, kind) for kind in (PLAIN, *arguments.kinds)}
    try:
        model = model_folder("")[0]
        found |= {("SmolLM2", PLAIN): Path(gguf(model, "bf16")), ("SmolLM2", SMALL): Path(gguf(model, "q4_1"))}
    except MegaKVError as error:
        not_run["SmolLM2"] = str(error)
    return found


def measure(arguments: argparse.Namespace, paths: Mapping[tuple[str, str], Path], not_run: dict[str, str]) -> Rows:
    """Rounds of all engines with all files, at every length."""
    cores, rows = sorted(os.sched_getaffinity(0))[:CORES], Rows()
    positions = max(arguments.lengths) + arguments.new_tokens + 64
    with ExitStack() as stack:
        workers: dict[tuple[str, str, str], Worker] = {}
        for (model, kind), path in tqdm(paths.items(), desc="starting"):
            for name in (OWN, NATIVE) if kind != PLAIN else (OWN,):
                try:
                    worker = Worker(name, path, "bf16", cores=cores, positions=positions, weights=path)
                    workers[model, kind, name] = stack.enter_context(worker)
                    worker.turn(range(5, 30), 2)
                except MegaKVError as error:
                    not_run[f"{model}, {kind}, {name}"] = str(error)
                    workers.pop((model, kind, name), None)
        for length in arguments.lengths:
            turns: dict[tuple[str, str, str], list[Turn]] = {key: [] for key in workers}
            for _ in tqdm(range(arguments.repeats), desc=f"{length:,} tokens"):
                prompt = torch.randint(3, 30_000, (length,)).clamp_(max=arguments.vocab - 1).tolist()
                for key, worker in workers.items():
                    turns[key].append(worker.turn(prompt, arguments.new_tokens))
            for (model, kind, name), found in turns.items():
                times = {"seconds": [turn.ttft_s for turn in found], "ttit_s": [turn.ttit_s for turn in found]}
                row = {"model": model, "weights": kind, "engine": name, "context": length, "threads": CORES, **times}
                row["weight_bytes"] = workers[model, kind, name].facts.get("weight_bytes")
                rows.append(row | {"peak_bytes": max(turn.peak_bytes for turn in found)})
    return rows


def equal_tokens(arguments: argparse.Namespace, paths: Mapping[tuple[str, str], Path]) -> dict[str, bool]:
    """Whether drawn requests have the tokens of transformers' model of what a file unpacks to, both in float32."""
    found = {}
    for (model, kind), path in paths.items():
        if kind == PLAIN:
            continue
        place: dict[str, Any] = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        plain = AutoModelForCausalLM.from_pretrained(path.parent, **place, dtype=torch.float32).eval()
        with megakv.init_inference(str(path), {"dtype": "fp32"}) as engine:
            equal = True
            for _ in tqdm(range(arguments.requests), desc=f"tokens of {model}, {kind}"):
                ids = torch.randint(3, min(arguments.vocab, 30_000), (1, int(torch.randint(1, 129, ()))))
                given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
                with torch.no_grad():
                    equal &= torch.equal(engine.generate(ids, **given), plain.generate(ids, **given))
        found[f"{model}, {kind}"] = bool(equal)
    return found


def run(arguments: argparse.Namespace) -> Found:
    not_run: dict[str, str] = {}
    torch.set_num_threads(CORES)
    with TemporaryDirectory(prefix="megakv-formats-") as folder:
        paths = files(arguments, Path(folder), not_run)
        rows = measure(arguments, paths, not_run)
        equal = equal_tokens(arguments, paths)
    summary: Summary = {f"{name}_over_bf16": {} for name in ("weights", *MEASURES)} | {"ttit_over_llama_cpp": {}}
    cells = {(row["model"], row["weights"], row["engine"], row["context"]): row for row in rows}
    for (model, kind, engine, length), row in cells.items():
        base, theirs = cells.get((model, PLAIN, OWN, length)), cells.get((model, kind, NATIVE, length))
        if engine != OWN or kind == PLAIN or base is None:
            continue
        where = f"{model}, {kind}"
        summary["weights_over_bf16"][where] = row["weight_bytes"] / base["weight_bytes"]
        for name, key in MEASURES.items():
            summary[f"{name}_over_bf16"].setdefault(where, {})[str(length)] = ratio(row[key], base[key]).to_json()
        if theirs is not None:
            found = ratio(row["ttit_s"], theirs["ttit_s"]).to_json()
            summary["ttit_over_llama_cpp"].setdefault(where, {})[str(length)] = found
    for row in rows:
        row["ttft"], row["ttit"] = median(row["seconds"]).value, median(row["ttit_s"]).value
    show(rows, "model weights engine context ttft ttit:ms weight_bytes:MB peak_bytes:MB", "Formats of weights")
    show_summary(summary)
    return rows, {**summary, "tokens_equal": all(equal.values()), "equal": equal, "not_run": not_run}, []


if __name__ == "__main__":
    sys.exit(benchmark_alone("formats", parse_arguments(), run))
