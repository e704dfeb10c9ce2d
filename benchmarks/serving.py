"""Service of `megakv serve` for many at a time: the command itself, its ranks, and a client that speaks HTTP with it.

Every part starts the servers it needs, measures, and says what of it is the summary and what the pictures. Streams and
prompts are drawn with --seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.document import model_folder
from harness.launch import Found, benchmark_alone
from harness.options import DTYPES, Options
from harness.publish import run_parts
from harness.serving import kept, load, lookup, trace

PARTS: dict[str, Any] = {
    "gaps": (load.measure_gaps, load.report_gaps),
    "trace": (trace.measure, trace.report),
    "returns": (kept.measure_returns, kept.report_returns),
    "restart": (kept.measure_restart, kept.report_restart),
    "throughput": (load.measure_throughput, load.report_throughput),
    "lookup": (lookup.measure, lookup.report),
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
    options.choice("--dtype", DTYPES, "bf16", "of weights and cache")
    options.add("--max-gap", 0.3, "of the server, in seconds")
    options.add("--seed", 23, "of everything that is drawn", least=0)
    options.add("--prompt", 7000, "gaps, returns, restart: tokens of the prompt that is read")
    options.add("--streams", 4, "gaps: streams beside it")
    options.add("--repeats", {"": 3, "quick": 1}, "gaps, returns, restart, throughput: rounds")
    options.add("--trace", "", "trace: a JSONL in Mooncake's format")
    options.add("--trace-requests", {"": 300, "quick": 48}, "trace: its first so many requests")
    options.add("--divide", 24, "trace: by what its lengths are divided")
    options.numbers("--concurrent", "1,4,16,64", "throughput: streams at a time")
    options.add("--short", {"": 5000, "quick": 600}, "memory: short requests")
    options.add("--new-tokens", {"": 64, "quick": 24}, "throughput: tokens of an answer")
    options.add("--file", {"": 2000, "quick": 500}, "lookup: tokens of the file that is edited")
    options.add("--drawn", {"": 256, "quick": 96}, "lookup: tokens of an answer that repeats nothing")
    return options.parse(argv)


def run(arguments: argparse.Namespace) -> Found:
    model, positions = model_folder(arguments.model)
    arguments.model, most = str(model), positions - 256
    if arguments.prompt > most:
        raise ValueError(f"--prompt {arguments.prompt}: the model's positions leave {most} for it beside the answer")
    return run_parts(PARTS, arguments, may_fail=("trace", "vllm", "guidellm"))


if __name__ == "__main__":
    sys.exit(benchmark_alone("serving", parse_arguments(), run))
