"""Service of `megakv serve` for many at a time: the command itself, its ranks, and a client that speaks HTTP with it.

Every part starts the servers it needs, measures, and says what of it is the summary and what the pictures. Streams,
prompts and traces are drawn with --seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.document import model_folder
from harness.launch import Found, benchmark_alone, is_rank, serve
from harness.options import DTYPES, Options
from harness.publish import run_parts
from harness.serving import answers, kept, load, trace

PARTS: dict[str, Any] = {
    "answers": (answers.measure, answers.report),
    "gaps": (load.measure_gaps, load.report_gaps),
    "trace": (trace.measure, trace.report),
    "returns": (kept.measure_returns, kept.report_returns),
    "restart": (kept.measure_restart, kept.report_restart),
    "throughput": (load.measure_throughput, load.report_throughput),
    "memory": (kept.measure_memory, kept.report_memory),
    "vllm": (load.measure_vllm, load.report_vllm),
    "guidellm": (load.measure_guidellm, load.report_guidellm),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "less of everything: 8 minutes")
    options.names("--parts", PARTS, ",".join(PARTS), "what to measure")
    options.add("--model", "", "folder of the model, with its tokenizer; SmolLM2-135M-Instruct if none is named")
    options.add("--ranks", 2, "context-parallel ranks of a server", kind=int)
    options.add("--threads", 1, "threads of every rank")
    options.choice("--dtype", DTYPES, "bf16", "of weights and cache; `answers` takes fp32")
    options.add("--max-gap", 0.3, "of the server, in seconds")
    options.add("--seed", 23, "of everything that is drawn", least=0)
    options.add("--requests", {"": 500, "quick": 40}, "answers: how many")
    options.add("--longest", {"": 6000, "quick": 1500}, "answers: tokens of a prompt at most")
    options.add("--prompt", 7000, "gaps, returns, restart: tokens of the prompt that is read")
    options.add("--streams", 4, "gaps: streams beside it")
    options.add("--repeats", {"": 3, "quick": 1}, "gaps, returns, restart: rounds")
    options.add("--trace", "", "trace: a JSONL in Mooncake's format; one is generated if none is named")
    options.add("--trace-requests", {"": 300, "quick": 48}, "trace: its first so many requests")
    options.add("--divide", 24, "trace: by what its lengths are divided")
    options.numbers("--concurrent", "1,4,16,64", "throughput: streams at a time")
    options.add("--short", {"": 5000, "quick": 600}, "memory: short requests")
    options.add("--timeout", 3600.0, "answers: seconds after which the ranks of engine.generate are ended")
    options.hidden("--asked", "--part")
    options.add("--new-tokens", {"": 64, "quick": 24}, "throughput: tokens of an answer")
    return options.parse(argv)


def run(arguments: argparse.Namespace) -> Found:
    model, positions = model_folder(arguments.model)
    arguments.model, most = str(model), positions - 256
    for name in ("prompt", "longest"):
        if (asked := getattr(arguments, name)) > most:
            raise ValueError(f"--{name} {asked}: the model's positions leave {most} for it beside the answer")
    return run_parts(PARTS, arguments, may_fail=("vllm", "guidellm"))


if __name__ == "__main__":
    asked = parse_arguments()
    if is_rank():
        # One of those that a server's answers are compared with.
        sys.exit(serve(asked, answers.generate_alone, shared_memory=False))
    sys.exit(benchmark_alone("serving", asked, run))
