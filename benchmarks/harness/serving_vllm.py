"""The loads of `gaps` and `throughput` by the same client on vLLM's server, with as many threads in one process."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from . import serving_gaps, serving_throughput
from .launch import Rows, Summary
from .publish import show
from .serving_server import VllmServer


def measure(arguments: argparse.Namespace) -> Rows:
    """Rows of both, as MegaKV's."""
    with VllmServer(arguments) as server:
        gaps = asyncio.run(serving_gaps.rounds(server.url, arguments, progress=False))
        rates = asyncio.run(serving_throughput.rounds(server.url, arguments))
    found = [{"server": "vllm", "load": "gaps", "decode_share": 0.0, **row} for row in gaps]
    return [*found, *({"server": "vllm", "load": "throughput", **row} for row in rates)]


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """What MegaKV's parts say, of vLLM."""
    gaps, rates = ([row for row in rows if row["load"] == load] for load in ("gaps", "throughput"))
    own, _ = serving_gaps.report(gaps)
    columns = "server streams sampled tokens_per_second over_one over_greedy"
    show(serving_throughput.compared(rates), columns, "Tokens per second")
    own["alone_seconds"] = [row["alone_seconds"] for row in gaps]
    for name, some in zip(("tokens", "sampled_tokens"), serving_throughput.kinds(rates), strict=True):
        own[f"{name}_per_second"] = {str(row["streams"]): row["tokens_per_second"] for row in some}
    chart = serving_gaps.chart(gaps)
    return {"vllm": own}, [chart]
