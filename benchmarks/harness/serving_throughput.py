"""Tokens per second of many streams at a time, over those of one."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from .charts import lines
from .launch import Rows, Summary
from .publish import show
from .serving_client import Client
from .serving_prompts import Passages
from .serving_server import megakv_server

PROMPT = 64
LEAST_REQUESTS = 4


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
        for streams in arguments.concurrent:
            prompts = [passages.prompt(PROMPT) for _ in range(max(streams, LEAST_REQUESTS))]
            at_a_time = asyncio.Semaphore(streams)

            async def one(prompt: list[int], free: asyncio.Semaphore = at_a_time) -> dict[str, Any]:
                async with free:
                    reply = await client.complete(prompt, arguments.new_tokens)
                return {"ttft": reply.ttft, "seconds": reply.stamps[-1] - reply.sent, "tokens": len(reply.stamps)}

            began = time.perf_counter()
            answers = await asyncio.gather(*map(one, prompts))
            seconds = time.perf_counter() - began
            tokens = sum(answer["tokens"] for answer in answers)
            row = {"streams": streams, "prompt": PROMPT, "new_tokens": arguments.new_tokens, "seconds": seconds}
            rows.append({**row, "tokens_per_second": tokens / seconds, "answers": answers})
    return rows


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Over one stream's rate, by the number of streams; and the chart."""
    for row in rows:
        row["over_one"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    show(rows, "server streams tokens_per_second over_one", "Tokens per second")
    over = {str(row["streams"]): row["over_one"] for row in rows if row["server"] == "megakv"}
    words = {
        "title": "Streams at a time",
        "subtitle": f"prompts of {PROMPT} tokens, answers of {rows[0]['new_tokens']}",
        "x_label": "streams",
        "y_label": "tokens per second, more is better",
    }
    return {"throughput_over_one": over}, [lines("throughput", rows, "streams", "tokens_per_second", "server", **words)]
