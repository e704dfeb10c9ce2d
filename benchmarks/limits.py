"""Kernels against what the machine can do at all: its rates of matrix products, and of reading memory.

Everything of a case takes turns: MegaKV's kernel, PyTorch's for the same, and what sets the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.launch import Found, benchmark_alone
from harness.limits import PARTS, measure, report
from harness.options import DTYPES, Options


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "one length and one head dimension, 3 rounds: less than a minute")
    options.choice("--device", ("cpu", "cuda"), "cpu", "where kernels run")
    options.names("--parts", PARTS, {"cpu": "attention,products,rates,host", "cuda": "ring"}, "what to measure")
    options.numbers("--threads", {"": "1,2,4", "quick": "2"}, "cores that compute; attention takes the most of them")
    options.names("--dtypes", DTYPES, {"cuda": "bf16", "cpu": "fp32,bf16"}, "types of the inputs")
    options.add("--matrix", {"cuda": 8192, "cpu": 2048}, "rows and columns of the matrices that are multiplied")
    options.add("--repeats", {"": 7, "quick": 3}, "rounds of each case")
    options.numbers("--keys", {"quick": "2K", "": "4K,8K,16K"}, "attention: tokens of the prompt")
    options.numbers("--head-dims", {"quick": "64", "": "64,128"}, "attention: head dimensions; of others the largest")
    options.numbers("--groups", "1,3,8", "attention: query heads that share a KV head")
    options.add("--heads", 8, "attention: query heads, or the next multiple of the group below")
    options.add("--megabytes", {"": 256, "quick": 16}, "products, host: weights, keys and values, beyond all caches")
    options.numbers(
        "--rows", {"quick": "32,256,1K", "": "32,64,256,1K,4K"}, "rates: rows that weights are multiplied by"
    )
    options.numbers("--kv-heads", "1,8,32", "host: KV heads, 32 query heads to them")
    options.numbers("--contexts", {"cuda": "8K,32K,128K,512K", "cpu": "1K"}, "ring: tokens of the prompt")
    options.numbers("--ranks", {"cuda": "2,4,8,16", "cpu": "2,4"}, "ring: context-parallel degrees")
    arguments = options.parse(argv)
    if arguments.groups[-1] > arguments.heads:
        options.error(f"--heads {arguments.heads} is less than --groups {arguments.groups[-1]}")
    for kv_heads in arguments.kv_heads:
        if 32 % kv_heads:
            options.error(f"--kv-heads {kv_heads} is no divisor of 32 query heads")
    if arguments.contexts[0] < 2 * arguments.ranks[-1]:
        options.error(f"--contexts {arguments.contexts[0]} has fewer tokens than 2 x --ranks {arguments.ranks[-1]}")
    return arguments


def run(arguments: argparse.Namespace) -> Found:
    rows = [row for part in arguments.parts for row in measure(part, arguments)]
    return rows, report(rows), []


if __name__ == "__main__":
    sys.exit(benchmark_alone("limits", parse_arguments(), run))
