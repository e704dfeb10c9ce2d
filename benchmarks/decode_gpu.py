"""Time per token on one GPU: the plain transformers model, MegaKV kernel by kernel, and MegaKV in CUDA graphs.

Weights are random, of real models' sizes, and the same in memory for all three, which take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from harness.launch import Found, Rows, Summary, benchmark_alone
from harness.links import ROOT
from harness.models import DTYPES, twin
from harness.options import Options
from harness.publish import show
from harness.timing import clocked
from harness.world import alone
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import megakv

RECIPES = ROOT / "recipes"
PLAIN, EAGER, GRAPHS = METHODS = ("transformers", "megakv_eager", "megakv_graphs")
SMALL: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
"""SmolLM2-135M, whose recipe takes its sizes from the checkpoint."""
SMOLLM2 = "smollm2"
WARM = 5  # First steps that are left out: graphs are captured in them


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.choice("--device", ("cuda", "cpu"), "cuda", "cpu only tries the code, smaller")
    known = [SMOLLM2, *sorted(path.parent.name for path in RECIPES.glob("*/config.json"))]
    options.names("--models", known, {"cuda": "smollm2,llama3_8b", "cpu": "smollm2"}, "recipes, for their sizes")
    options.numbers("--contexts", {"cuda": "1K,8K", "cpu": "64"}, "tokens of each prompt")
    options.numbers("--batches", {"cuda": "1,16", "cpu": "1,2"}, "sequences")
    options.add("--most-tokens", 16 << 10, "tokens of all prompts; larger cases are left out", kind=int)
    options.add("--new", {"cuda": 24, "cpu": 8}, "tokens to generate")
    options.add("--repeats", 2, "timed rounds, in which methods take turns")
    options.add("--layers", {"cuda": None, "cpu": 2}, "decoder layers (default: the model's own)", kind=int)
    options.choice("--dtype", tuple(DTYPES), {"cuda": "bf16", "cpu": "fp32"}, "of weights and activations")
    options.add("--threads", 1, "threads on the CPU")
    arguments = options.parse(argv)
    if arguments.new <= WARM:
        options.error(f"--new {arguments.new}: allowed: more than {WARM}, as the first steps are left out")
    return arguments


def measure_model(arguments: argparse.Namespace, name: str) -> tuple[Rows, Rows]:
    """Rows of a model's cases, method by method, and the cases that are too large."""
    config = LlamaConfig(**SMALL) if name == SMOLLM2 else AutoConfig.from_pretrained(RECIPES / name)
    config.max_position_embeddings = arguments.contexts[-1] + arguments.new
    if arguments.layers is not None:
        config.num_hidden_layers = arguments.layers
    torch.manual_seed(0)
    with torch.device(arguments.device):
        plain = AutoModelForCausalLM.from_config(config, dtype=DTYPES[arguments.dtype]).eval()
    models: dict[str, Any] = {PLAIN: plain}
    rows: Rows = []
    skipped: Rows = []
    try:
        for method, graphs in ((EAGER, False), (GRAPHS, None)):
            settings = {"dtype": arguments.dtype, "enable_cuda_graph": graphs}
            models[method] = megakv.init_inference(twin(plain), settings)
        for batch, context in tqdm([*product(arguments.batches, arguments.contexts)], desc=name, unit="case"):
            case = {"model": name, "batch": batch, "context": context}
            if batch * context > arguments.most_tokens:
                skipped.append(case)
                continue
            ids = torch.randint(3, config.vocab_size, (batch, context), device=arguments.device)
            own = {method: {**case, "method": method, "seconds": [], "ttft_s": []} for method in METHODS}
            tokens = dict[str, Any]()
            for turn in range(1 + arguments.repeats):
                for method, model in models.items():
                    options = {"min_new_tokens": arguments.new, "pad_token_id": 0}
                    with torch.no_grad():
                        tokens[method], clock = clocked(model.generate, ids, arguments.new, **options)
                    if turn:
                        own[method]["ttft_s"].append(clock.prompt_s)
                        own[method]["seconds"].append(float(np.median(clock.seconds()[WARM - 1 :])))
            for method, row in own.items():
                same = (tokens[method] == tokens[PLAIN])[:, context:]
                rows.append({**row, "token_agreement": float(same.double().mean())})
    finally:
        for method in set(models) - {PLAIN}:
            models[method].destroy()
    return rows, skipped


def run(arguments: argparse.Namespace) -> Found:
    rows: Rows = []
    skipped: Rows = []
    with alone():
        for name in arguments.models:
            own, left = measure_model(arguments, name)
            rows += own
            skipped += left
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    if not rows:
        raise ValueError(f"--most-tokens {arguments.most_tokens}: every case has more")
    summary: Summary = {"skipped": skipped, "cases": []}
    for plain, *others in (rows[at : at + len(METHODS)] for at in range(0, len(rows), len(METHODS))):
        found = {key: plain[key] for key in ("model", "batch", "context")}
        over = {row["method"]: np.array(row["seconds"]) / np.array(plain["seconds"]) for row in others}
        found |= {f"{method}_over_transformers": float(np.median(ratio)) for method, ratio in over.items()}
        found["graphs_ms"] = 1e3 * float(np.median(others[-1]["seconds"]))
        summary["cases"].append({**found, "transformers_over_graphs": float(np.median(1 / over[GRAPHS]))})
    show(rows, "model batch context method seconds:ms ttft_s:ms token_agreement")
    return rows, summary, []


if __name__ == "__main__":
    sys.exit(benchmark_alone("decode_gpu", parse_arguments(), run))
