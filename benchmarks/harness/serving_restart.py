"""All ranks are killed; a server on another number of ranks finds on disk what was read: TTFT before over after."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megakv.base.errors import MegaKVError

from .launch import Rows, Summary
from .publish import show
from .serving_client import Client, Reply
from .serving_prompts import Passages
from .serving_server import Server, megakv_server
from .statistics import paired_ratio

WRITTEN_S = 60.0


def measure(arguments: argparse.Namespace) -> Rows:
    """One row, with the seconds of each round; each has a store of its own."""
    passages = Passages(arguments.model, arguments.seed)
    # As many cores, divided in another way.
    after = {"ranks": 1, "threads": arguments.threads * arguments.ranks}
    if arguments.ranks == 1:
        after = {"ranks": 2, "threads": arguments.threads}
    row: dict[str, Any] = {"context": arguments.prompt, "ranks": arguments.ranks, "ranks_after": after["ranks"]}
    row |= {"seconds": [], "after_seconds": [], "cached_tokens": [], "tokens_equal": []}
    for _ in range(arguments.repeats):
        prompt = passages.prompt(arguments.prompt)
        with TemporaryDirectory(prefix="megakv-benchmark-store-") as folder:
            with megakv_server(arguments, "--store", folder) as server:
                asyncio.run(_ask(server.url, passages.prompt(arguments.prompt // 4), 8))
                cold = asyncio.run(_ask(server.url, prompt, 1))
                _wait_until_written(server, Path(folder), len(prompt))
                server.kill()
            with megakv_server(arguments, "--store", folder, **after) as server:
                warm = asyncio.run(_ask(server.url, prompt, 1))
        row["seconds"].append(cold.ttft)
        row["after_seconds"].append(warm.ttft)
        row["cached_tokens"].append(warm.cached_tokens)
        row["tokens_equal"].append(cold.pieces == warm.pieces)
    return [row]


async def _ask(url: str, prompt: list[int], new_tokens: int) -> Reply:
    async with Client(url) as client:
        return await client.complete(prompt, new_tokens, pieces=True)


def _wait_until_written(server: Server, folder: Path, tokens: int) -> None:
    """Until the store has the prompt, and no file of it is under way."""
    deadline = time.monotonic() + WRITTEN_S
    before: list[tuple[str, int]] = []
    while True:
        now = sorted((str(path), path.stat().st_size) for path in folder.rglob("*") if path.is_file())
        if server.status()["kv_tokens"].get("disk", 0) >= tokens - 1 and now == before:
            return
        if time.monotonic() > deadline:
            raise MegaKVError(f"after {WRITTEN_S:g} s the store has not all of the prompt: {server.status()}")
        before = now
        time.sleep(0.5)


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """How many times sooner the first token is there."""
    (row,) = rows
    row["speedup"] = paired_ratio(row["seconds"], row["after_seconds"]).to_json()
    show(
        rows, "context ranks ranks_after seconds:s after_seconds:s cached_tokens speedup", "All ranks killed, a restart"
    )
    return {"restart_speedup": row["speedup"]["value"]}, []
