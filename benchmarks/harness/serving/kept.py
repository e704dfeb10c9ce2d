"""Keeping by a server: for a client that comes back, over a restart after all ranks were killed, and of its memory."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm.asyncio import tqdm

from megakv.base.errors import MegaKVError

from ..document import Passages
from ..launch import Rows, Summary
from ..publish import show
from ..statistics import median, paired_ratio
from .server import Client, Reply, Server, megakv_server

LEAVES_AT = 0.9
WRITTEN_S = 60.0
LONGEST, NEW_TOKENS, CONCURRENT = 64, 4, 16
KV_TOKENS = 2048  # Few enough for the first tenth of the requests to fill them
POINTS = 50


def measure_returns(arguments: argparse.Namespace) -> Rows:
    """A client that leaves when most of its prompt is read, and comes back: one row, with the seconds of each round."""
    with megakv_server(arguments) as server:
        return [asyncio.run(_returns(server, arguments))]


async def _returns(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    passages, length = Passages(arguments.model, arguments.seed), arguments.prompt
    names = ("seconds", "returning_seconds", "rest_seconds", "read", "cached_tokens")
    row: dict[str, Any] = {"context": length, **{name: [] for name in names}}

    def leaves(reply: Reply) -> bool:
        return bool(reply.progress) and reply.progress[-1][1] >= LEAVES_AT * length

    async with Client(server.url) as client:
        await client.complete(passages.prompt(length // 4), 8)
        for _ in range(arguments.repeats):
            cold = await client.complete(passages.prompt(length), 1, progress=True)
            prompt = passages.prompt(length)
            left = await client.complete(prompt, 1, progress=True, leaves=leaves)
            await asyncio.to_thread(server.wait_until_idle)
            back = await client.complete(prompt, 1)
            # What a cold start took for the tokens that were not there yet.
            there = next(at for at, read in cold.progress if read >= back.cached_tokens)
            found = cold.ttft, back.ttft, cold.stamps[0] - there, left.progress[-1][1], back.cached_tokens
            for name, value in zip(names, found, strict=True):
                row[name].append(value)
    return row


def report_returns(rows: Rows) -> tuple[Summary, list[Any]]:
    """TTFT of those who return, over that of a cold start."""
    (row,) = rows
    row["ratio"] = paired_ratio(row["returning_seconds"], row["seconds"]).to_json()
    columns = "context seconds:s rest_seconds:s returning_seconds:s cached_tokens ratio"
    show(rows, columns, "Who leaves at 90% and returns")
    back, cold, rest = (median(row[name]).value for name in ("returning_seconds", "seconds", "rest_seconds"))
    return {"returning_over_cold": back / cold, "returning_over_rest_of_cold": back / rest}, []


def measure_restart(arguments: argparse.Namespace) -> Rows:
    """A server on another number of ranks finds on disk what was read: one row; each round has a store of its own."""
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


def report_restart(rows: Rows) -> tuple[Summary, list[Any]]:
    """How many times sooner the first token is there."""
    (row,) = rows
    row["speedup"] = paired_ratio(row["seconds"], row["after_seconds"]).to_json()
    columns = "context ranks ranks_after seconds:s after_seconds:s cached_tokens speedup"
    show(rows, columns, "All ranks killed, a restart")
    return {"restart_speedup": row["speedup"]["value"]}, []


def measure_memory(arguments: argparse.Namespace) -> Rows:
    """A row for each of some points on the way: requests that were answered, and the ranks' resident memory."""
    with megakv_server(arguments, "--kv-tokens", KV_TOKENS) as server:
        return asyncio.run(_many(server, arguments))


async def _many(server: Server, arguments: argparse.Namespace) -> Rows:
    passages, free = Passages(arguments.model, arguments.seed), asyncio.Semaphore(CONCURRENT)
    rows: Rows = []
    done, step = 0, max(1, arguments.short // POINTS)

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


def report_memory(rows: Rows) -> tuple[Summary, list[Any]]:
    """Growth of the rank that has grown most, since the first tenth."""
    last = rows[-1]
    early = next(row for row in rows if row["requests"] * 10 >= last["requests"])
    growth = max(after / before for before, after in zip(early["rss"], last["rss"], strict=True)) - 1
    show([early, last], "requests rss:MB", "Resident memory, the largest rank's")
    return {"memory_growth": growth, "memory_requests": [early["requests"], last["requests"]]}, []
