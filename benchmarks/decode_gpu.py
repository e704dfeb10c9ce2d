"""Time per token on one GPU: the plain transformers model, MegaKV kernel by kernel, and MegaKV in CUDA graphs.

Weights are random, of real models' sizes, and the same in memory for all three, which take turns.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from harness.launch import Rows, Summary, benchmark_alone
from harness.options import DTYPES, Options

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
PLAIN, EAGER, GRAPHS = METHODS = ("transformers", "megakv_eager", "megakv_graphs")
SMALL: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
"""SmolLM2-135M, whose recipe takes its sizes from the checkpoint."""
SMOLLM2 = "smollm2"
WARM = 5
"""First steps that are left out: graphs are captured in them."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.choice("--device", ("cuda", "cpu"), "cuda", "cpu only tries the code, smaller")
    options.add(
        "--models", {"cuda": "smollm2,llama3_8b", "cpu": "smollm2"}, "recipes, for their models' sizes", kind=str
    )
    options.numbers("--contexts", {"cuda": "1K,8K", "cpu": "64"}, "tokens of each prompt")
    options.numbers("--batches", {"cuda": "1,16", "cpu": "1,2"}, "sequences")
    options.add("--most-tokens", 16 << 10, "tokens of all prompts; larger cases are left out", kind=int)
    options.add("--new", {"cuda": 24, "cpu": 8}, "tokens to generate")
    options.add("--repeats", 2, "timed rounds, in which methods take turns")
    options.add("--layers", {"cuda": None, "cpu": 2}, "decoder layers (default: the model's own)", kind=int)
    options.choice("--dtype", DTYPES, {"cuda": "bf16", "cpu": "fp32"}, "of weights and activations")
    options.add("--threads", 1, "threads on the CPU")
    arguments = options.parse(argv)
    known = [SMOLLM2, *sorted(path.parent.name for path in RECIPES.glob("*/config.json"))]
    arguments.models = options.some_of("--models", arguments.models, known)
    if arguments.new <= WARM:
        options.error(f"--new {arguments.new}: allowed: more than {WARM}, as the first steps are left out")
    return arguments


def timed(model: Any, ids: Any, new: int) -> tuple[list[float], Any]:
    """When each token was there, in seconds from the start, and all tokens."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Times(StoppingCriteria):
        def __init__(self) -> None:
            self.found: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            if ids.is_cuda:
                torch.cuda.synchronize()
            self.found.append(time.perf_counter() - begun)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=ids.device)

    times, begun = Times(), time.perf_counter()
    with torch.no_grad():
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([times]),
        )
    return times.found, tokens


def measure_model(arguments: argparse.Namespace, name: str, bar: Any) -> tuple[Rows, Rows]:
    import numpy as np
    import torch
    from harness.models import DTYPES as TYPES
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    import megakv

    config = LlamaConfig(**SMALL) if name == SMOLLM2 else AutoConfig.from_pretrained(RECIPES / name)
    config.max_position_embeddings = arguments.contexts[-1] + arguments.new
    if arguments.layers is not None:
        config.num_hidden_layers = arguments.layers
    torch.manual_seed(0)
    with torch.device(arguments.device):
        plain = AutoModelForCausalLM.from_config(config, dtype=TYPES[arguments.dtype]).eval()
    same = {id(each): each for each in plain.parameters()}
    engines, models = [], {PLAIN: plain}
    rows: Rows = []
    skipped: Rows = []
    try:
        for method, graphs in ((EAGER, False), (GRAPHS, None)):
            settings = {"dtype": arguments.dtype, "enable_cuda_graph": graphs}
            engines.append(megakv.init_inference(copy.deepcopy(plain, dict(same)), settings))
            models[method] = engines[-1]
        for batch, context in product(arguments.batches, arguments.contexts):
            case = {"model": name, "batch": batch, "context": context}
            bar.set_postfix_str(f"{name}, {batch} x {context:,}")
            if batch * context > arguments.most_tokens:
                skipped.append(case)
                bar.update()
                continue
            ids = torch.randint(3, config.vocab_size, (batch, context), device=arguments.device)
            ttft: dict[str, list[float]] = {method: [] for method in METHODS}
            ttit: dict[str, list[float]] = {method: [] for method in METHODS}
            tokens = dict[str, Any]()
            for turn in range(1 + arguments.repeats):
                for method, model in models.items():
                    times, tokens[method] = timed(model, ids, arguments.new)
                    if turn:
                        ttft[method].append(times[0])
                        ttit[method].append(float(np.median(np.diff(times)[WARM - 1 :])))
            rows += [
                {
                    **case, "method": method, "seconds": ttit[method], "ttft_s": ttft[method],
                    "token_agreement": float((tokens[method] == tokens[PLAIN])[:, context:].double().mean()),
                }
                for method in METHODS
            ]  # fmt: skip
            bar.update()
    finally:
        for engine in engines:
            engine.destroy()
    return rows, skipped


def run(arguments: argparse.Namespace) -> tuple[Rows, Summary, list[Any]]:
    import numpy as np
    import torch
    from harness.charts import bars
    from harness.publish import show
    from harness.world import alone
    from tqdm import tqdm

    rows: Rows = []
    skipped: Rows = []
    cases = len(arguments.models) * len(arguments.batches) * len(arguments.contexts)
    with alone(), tqdm(total=cases, unit="case") as bar:
        for name in arguments.models:
            own, left = measure_model(arguments, name, bar)
            rows += own
            skipped += left
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    if not rows:
        raise ValueError(f"--most-tokens {arguments.most_tokens}: every case has more")
    summary: Summary = {"skipped": skipped, "cases": []}
    for plain, *others in (rows[at : at + len(METHODS)] for at in range(0, len(rows), len(METHODS))):
        found = {key: plain[key] for key in ("model", "batch", "context")}
        for row in others:
            ratio = np.array(row["seconds"]) / np.array(plain["seconds"])
            found[f"{row['method']}_over_transformers"] = float(np.median(ratio))
        graphs = float(np.median(others[-1]["seconds"]))
        summary["cases"].append({**found, "graphs_ms": 1e3 * graphs, "transformers_over_graphs": float(
            np.median(np.array(plain["seconds"]) / np.array(others[-1]["seconds"]))
        )})  # fmt: skip
    show(rows, "model batch context method seconds:ms ttft_s:ms token_agreement")
    drawn = [
        {**row, "label": f"{row['model']}, {row['batch']} x {row['context']:,}: {row['method']}",
         "own": row["method"] == GRAPHS}
        for row in rows
    ]  # fmt: skip
    words = {"title": "Time per token on one device", "subtitle": f"{arguments.dtype}, random weights"}
    chart = bars("steps", drawn, "label", "seconds", scale=1e3, own="own", unit="ms", **words)
    return rows, summary, [chart]


if __name__ == "__main__":
    sys.exit(benchmark_alone("decode_gpu", parse_arguments(), run))
