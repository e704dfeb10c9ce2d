"""Tokens per second of many streams at a time, over those of one; of the likeliest tokens, and of drawn ones."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Any

from .charts import lines
from .launch import Rows, Summary
from .publish import show
from .serving_client import GREEDY, Client
from .serving_prompts import Passages
from .serving_server import megakv_server

PROMPT = 64
LEAST_REQUESTS = 4
SAMPLED = {"temperature": 0.7, "top_p": 0.9}


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each number of streams."""
    with megakv_server(arguments) as server:
        return [{"server": "megakv", **row} for row in asyncio.run(rounds(server.url, arguments))]


async def rounds(url: str, arguments: argparse.Namespace) -> Rows:
    """As many requests as streams, and no fewer than a few, one after the other on each stream."""
    passages = Passages(arguments.model, arguments.seed)
    rows = []
    async with Client(url) as client:
        await asyncio.gather(*(client.complete(passages.prompt(PROMPT), 8) for _ in range(4)))
        for streams, sampling in itertools.product(arguments.concurrent, (GREEDY, SAMPLED)):
            prompts = [passages.prompt(PROMPT) for _ in range(max(streams, LEAST_REQUESTS))]
            at_a_time = asyncio.Semaphore(streams)

            async def one(
                prompt: list[int], free: asyncio.Semaphore = at_a_time, how: Mapping[str, float] = sampling
            ) -> dict[str, Any]:
                async with free:
                    reply = await client.complete(prompt, arguments.new_tokens, sampling=how)
                return {"ttft": reply.ttft, "seconds": reply.stamps[-1] - reply.sent, "tokens": len(reply.stamps)}

            began = time.perf_counter()
            answers = await asyncio.gather(*map(one, prompts))
            seconds = time.perf_counter() - began
            tokens = sum(answer["tokens"] for answer in answers)
            row = {"streams": streams, "prompt": PROMPT, "new_tokens": arguments.new_tokens, "seconds": seconds}
            row |= {"sampled": sampling is SAMPLED}
            rows.append({**row, "tokens_per_second": tokens / seconds, "answers": answers})
    return rows


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Over one stream's rate, by the number of streams; and the chart."""
    show(compared(rows), "server streams sampled tokens_per_second over_one over_greedy", "Tokens per second")
    greedy, sampled = kinds(rows)
    words = {
        "title": "Streams at a time",
        "subtitle": f"prompts of {PROMPT} tokens, answers of {rows[0]['new_tokens']} likeliest ones",
        "x_label": "streams",
        "y_label": "tokens per second, more is better",
    }
    summary = {
        "throughput_over_one": {str(row["streams"]): row["over_one"] for row in greedy},
        "sampled_over_greedy": {str(row["streams"]): row["over_greedy"] for row in sampled},
    }
    return summary, [lines("throughput", greedy, "streams", "tokens_per_second", "server", **words)]


def kinds(rows: Rows) -> tuple[Rows, Rows]:
    """Rows of the likeliest tokens, and of drawn ones."""
    return [row for row in rows if not row["sampled"]], [row for row in rows if row["sampled"]]


def compared(rows: Rows) -> Rows:
    """With the rate over one stream's, and that of drawn tokens over the likeliest ones'."""
    greedy, sampled = kinds(rows)
    for own in (greedy, sampled):
        for row in own:
            row["over_one"] = row["tokens_per_second"] / own[0]["tokens_per_second"]
    for row, like in zip(sampled, greedy, strict=True):
        row["over_greedy"] = row["tokens_per_second"] / like["tokens_per_second"]
    return rows
