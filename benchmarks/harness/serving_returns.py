"""A client that leaves when most of its prompt is read, and comes back: how long it waits, over a cold start."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from .launch import Rows, Summary
from .publish import show
from .serving_client import Client
from .serving_prompts import Passages
from .serving_server import Server, megakv_server
from .statistics import median, paired_ratio

LEAVES_AT = 0.9


def measure(arguments: argparse.Namespace) -> Rows:
    """One row, with the seconds of each round."""
    with megakv_server(arguments) as server:
        return [asyncio.run(_rounds(server, arguments))]


async def _rounds(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    passages, length = Passages(arguments.model, arguments.seed), arguments.prompt
    names = ("seconds", "returning_seconds", "rest_seconds", "read", "cached_tokens")
    row: dict[str, Any] = {"context": length, **{name: [] for name in names}}
    async with Client(server.url) as client:
        await client.complete(passages.prompt(length // 4), 8)
        for _ in range(arguments.repeats):
            cold = await client.complete(passages.prompt(length), 1, progress=True)
            prompt = passages.prompt(length)
            left = await client.complete(
                prompt, 1, progress=True,
                leaves=lambda reply: bool(reply.progress) and reply.progress[-1][1] >= LEAVES_AT * length,
            )  # fmt: skip
            await asyncio.to_thread(server.wait_until_idle)
            back = await client.complete(prompt, 1)
            row["seconds"].append(cold.ttft)
            row["returning_seconds"].append(back.ttft)
            row["read"].append(left.progress[-1][1])
            row["cached_tokens"].append(back.cached_tokens)
            # What a cold start took for the tokens that were not there yet.
            there = next(at for at, read in cold.progress if read >= back.cached_tokens)
            row["rest_seconds"].append(cold.stamps[0] - there)
    return row


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """TTFT of those who return, over that of a cold start."""
    (row,) = rows
    row["ratio"] = paired_ratio(row["returning_seconds"], row["seconds"]).to_json()
    show(
        rows,
        "context seconds:s rest_seconds:s returning_seconds:s cached_tokens ratio",
        "Who leaves at 90% and returns",
    )
    return {
        "returning_over_cold": median(row["returning_seconds"]).value / median(row["seconds"]).value,
        "returning_over_rest_of_cold": median(row["returning_seconds"]).value / median(row["rest_seconds"]).value,
    }, []
