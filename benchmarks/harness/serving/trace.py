"""Prompt tokens that are computed for a trace of conversations, over those that an unbounded prefix cache would.

Traces have Mooncake's format (FAST '25): a line for each request, with ids of its prompt's blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tqdm.asyncio import tqdm
from transformers import AutoConfig

from megakv.base.errors import MegaKVError

from ..document import Passages
from ..launch import Rows, Summary
from ..publish import show
from .server import Client, Server, megakv_server

BLOCK = 512  # Tokens of a block
CONCURRENT = 4  # Requests under way at a time, in the order of the trace
ROOM = 128  # Positions that stay free behind the longest prompt and answer


@dataclass(frozen=True)
class TraceRequest:
    """So many tokens, of which each `block` tokens have an id: equal ones are equal, and follow equal ones."""

    length: int
    output: int
    blocks: tuple[int, ...]


def read_trace(path: Path, count: int) -> list[TraceRequest]:
    """The first requests of a JSONL with `input_length`, `output_length` and `hash_ids`."""
    found = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(islice(file, count), 1):
            try:
                values: dict[str, Any] = json.loads(line)
                length, output = int(values["input_length"]), int(values["output_length"])
                blocks = tuple(int(block) for block in values["hash_ids"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"--trace {path}: line {number} is none of Mooncake's: {error!r}") from error
            found.append(TraceRequest(length, output, blocks))
    return found


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each request."""
    if not arguments.trace:
        raise MegaKVError("--trace FILE names the trace: a JSONL in Mooncake's format")
    trace = read_trace(Path(arguments.trace), arguments.trace_requests)
    asked = prompts(trace, arguments)
    with megakv_server(arguments) as server:
        found = asyncio.run(_ask(server, asked))
    cold = unbounded([prompt for prompt, _ in asked])
    return [
        {"trace": arguments.trace, "trace_tokens": request.length, "unbounded_computed": least, **row}
        for request, least, row in zip(trace, cold, found, strict=True)
    ]


def prompts(trace: Sequence[TraceRequest], arguments: argparse.Namespace) -> list[tuple[list[int], int]]:
    """The requests with lengths divided, cut to the model's positions: tokens and how many new ones."""
    passages, divide = Passages(arguments.model, arguments.seed), arguments.divide
    most = AutoConfig.from_pretrained(arguments.model).max_position_embeddings - ROOM
    texts: dict[int, list[int]] = {}
    found = []
    for request in trace:
        prompt: list[int] = []
        for number in request.blocks:
            if number not in texts:
                passages.random = Random(f"{arguments.seed} {number}")
                texts[number] = passages.prompt(max(1, BLOCK // divide))
            prompt += texts[number]
        length = min(most, len(prompt), max(1, request.length // divide))
        found.append((prompt[:length], max(1, min(request.output // divide, ROOM // 2))))
    return found


async def _ask(server: Server, asked: Sequence[tuple[list[int], int]]) -> Rows:
    free = asyncio.Semaphore(CONCURRENT)
    before = server.status()["computed_tokens"]

    async def one(client: Client, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        async with free:
            reply = await client.complete(prompt, new_tokens)
        row = {"prompt_tokens": len(prompt), "new_tokens": new_tokens, "cached_tokens": reply.cached_tokens}
        return {**row, "computed": len(prompt) - reply.cached_tokens, "ttft": reply.ttft}

    async with Client(server.url) as client:
        rows = list(await tqdm.gather(*(one(client, *each) for each in asked), desc="trace", unit="request"))
    rows[-1]["computed_by_server"] = server.status()["computed_tokens"] - before
    return rows


def unbounded(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each prompt that a cache that forgets nothing leaves to be computed, the last one in any case."""
    root: dict[int, Any] = {}
    found = []
    for prompt in prompts:
        node, known, new = root, 0, False
        for token in prompt:
            new = new or token not in node
            known += not new
            node = node.setdefault(token, {})
        found.append(len(prompt) - min(known, len(prompt) - 1))
    return found


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Over all requests, by the server's own count of what it computed."""
    total, least = (sum(row[name] for row in rows) for name in ("prompt_tokens", "unbounded_computed"))
    computed = rows[-1]["computed_by_server"]
    found = {"source": rows[0]["trace"], "requests": len(rows), "prompt_tokens": total, "shared": 1 - least / total}
    said = {**found, "unbounded": least, "computed": computed, "ttft": [row["ttft"] for row in rows]}
    columns = "source requests prompt_tokens shared:% unbounded computed ttft:s"
    show([said], columns, "Prompt tokens computed for a trace of conversations")
    return {"computed_over_unbounded_cache": computed / least, "trace": found}, []
