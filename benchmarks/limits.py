"""How near the kernels of prompts and decoding come to what the machine can do at all: its rates of matrix products and
of reading memory; what a token takes beside them, against plain transformers; and on ranks that share the cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from harness import limits
from harness.launch import benchmark_alone
from harness.options import DTYPES, Options
from harness.publish import run_parts

PARTS: dict[str, Any] = {
    "attention": (limits.measure_attention, limits.report_attention),
    "products": (limits.measure_products, limits.report_products),
    "around": (limits.measure_around, limits.report_around),
    "decoding": (limits.measure_decoding, limits.report_decoding),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "one length and one head dimension, 3 rounds: less than a minute")
    options.names("--parts", PARTS, ",".join(PARTS), "what to measure")
    options.add("--threads", 2, "cores that compute")
    options.names("--dtypes", DTYPES, "fp32,bf16", "types of the inputs")
    options.add("--matrix", 2048, "rows and columns of the matrices whose product is the rate to reach")
    options.add("--repeats", {"": 7, "quick": 3}, "rounds of each case")
    options.numbers("--keys", {"": "4K,8K,16K", "quick": "2K"}, "attention: tokens of the prompt")
    options.numbers("--head-dims", {"": "64,128", "quick": "64"}, "attention: head dimensions")
    options.numbers("--groups", "1,3,8", "attention: query heads that share a KV head")
    options.add("--heads", 8, "attention: query heads, or the next multiple of the group below")
    options.add("--weights-mb", {"": 256, "quick": 16}, "products: MiB of weights in a round, more than caches hold")
    text = "around, decoding: cached tokens of the model of SmolLM2's shape"
    options.add("--context", {"": 7900, "quick": 500}, text)
    options.numbers("--batches", {"": "1,4,16", "quick": "1,4"}, "decoding: sequences at a time")
    arguments = options.parse(argv)
    if arguments.groups[-1] > arguments.heads:
        options.error(f"--heads {arguments.heads} is less than --groups {arguments.groups[-1]}")
    return arguments


if __name__ == "__main__":
    sys.exit(benchmark_alone("limits", parse_arguments(), partial(run_parts, PARTS)))
