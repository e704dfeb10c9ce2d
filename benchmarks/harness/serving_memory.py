"""Memory of the ranks over many short requests: what it has grown by since the first tenth."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from tqdm.asyncio import tqdm

from .charts import lines
from .launch import Rows, Summary
from .publish import show
from .serving_client import Client
from .serving_prompts import Passages
from .serving_server import Server, megakv_server

LONGEST, NEW_TOKENS, CONCURRENT = 64, 4, 16
KV_TOKENS = 2048
"""Few enough for the first tenth to fill them."""
POINTS = 50


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each of some points on the way: requests that were answered, and the ranks' resident memory."""
    with megakv_server(arguments, "--kv-tokens", KV_TOKENS) as server:
        return asyncio.run(_ask(server, arguments))


async def _ask(server: Server, arguments: argparse.Namespace) -> Rows:
    passages = Passages(arguments.model, arguments.seed)
    rows: Rows = []
    done, step = 0, max(1, arguments.short // POINTS)
    free = asyncio.Semaphore(CONCURRENT)

    async def one(client: Client) -> None:
        nonlocal done
        async with free:
            length = passages.random.randint(1, LONGEST)
            await client.complete(passages.prompt(length), passages.random.randint(1, NEW_TOKENS))
        done += 1
        if done % step == 0 or done == arguments.short:
            rows.append({"requests": done, "rss": server.rss()})

    async with Client(server.url) as client:
        await tqdm.gather(*(one(client) for _ in range(arguments.short)), desc="memory", unit="request")
    return rows


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """The rank that has grown most."""
    last = rows[-1]
    early = next(row for row in rows if row["requests"] * 10 >= last["requests"])
    growth = max(after / before for before, after in zip(early["rss"], last["rss"], strict=True)) - 1
    show([early, last], "requests rss:MB", "Resident memory, the largest rank's")
    drawn = [
        {"requests": row["requests"], "rank": f"rank {rank}", "mb": rss / (1 << 20)}
        for row in rows
        for rank, rss in enumerate(row["rss"])
    ]
    words = {
        "title": "Memory over many requests",
        "subtitle": f"prompts of up to {LONGEST} tokens; {KV_TOKENS:,} tokens of keys and values",
        "x_label": "requests",
        "y_label": "MiB resident",
    }
    chart = lines("memory", drawn, "requests", "mb", "rank", log_x=False, **words)
    return {"memory_growth": growth, "memory_requests": [early["requests"], last["requests"]]}, [chart]
