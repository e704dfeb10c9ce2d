"""Prompt tokens that are computed for a trace of conversations, over those that an unbounded prefix cache would."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tqdm.asyncio import tqdm

from .launch import Rows, Summary
from .publish import show
from .serving_client import Client
from .serving_conversations import BLOCK, TraceRequest, generated, read_trace
from .serving_prompts import Passages
from .serving_server import Server, megakv_server

CONCURRENT = 4
"""Requests under way at a time, in the order of the trace."""
ROOM = 128
"""Positions that stay free behind the longest prompt and answer."""


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each request."""
    count = arguments.trace_requests
    if arguments.trace:
        trace = read_trace(Path(arguments.trace), count)
    else:
        trace = generated(count, arguments.seed)
    asked = prompts(trace, arguments)
    with megakv_server(arguments) as server:
        found = asyncio.run(_ask(server, asked))
    cold = unbounded([prompt for prompt, _ in asked])
    source = arguments.trace or "generated"
    return [
        {"trace": source, "trace_tokens": request.length, "unbounded_computed": least, **row}
        for request, least, row in zip(trace, cold, found, strict=True)
    ]


def prompts(trace: Sequence[TraceRequest], arguments: argparse.Namespace) -> list[tuple[list[int], int]]:
    """The requests with lengths divided, cut to the model's positions: tokens and how many new ones."""
    from transformers import AutoConfig

    passages, divide = Passages(arguments.model, arguments.seed), arguments.divide
    most = AutoConfig.from_pretrained(arguments.model).max_position_embeddings - ROOM
    block = max(1, BLOCK // divide)
    texts: dict[int, list[int]] = {}
    found = []
    for request in trace:
        prompt: list[int] = []
        for number in request.blocks:
            if number not in texts:
                passages.random = Random(f"{arguments.seed} {number}")
                texts[number] = passages.prompt(block)
            prompt += texts[number]
        length = min(most, len(prompt), max(1, request.length // divide))
        new = max(1, min(request.output // divide, ROOM // 2))
        found.append((prompt[:length], new))
    return found


async def _ask(server: Server, asked: Sequence[tuple[list[int], int]]) -> Rows:
    free = asyncio.Semaphore(CONCURRENT)
    before = server.status()["computed_tokens"]

    async def one(client: Client, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        async with free:
            reply = await client.complete(prompt, new_tokens)
        return {
            "prompt_tokens": len(prompt),
            "new_tokens": new_tokens,
            "cached_tokens": reply.cached_tokens,
            "computed": len(prompt) - reply.cached_tokens,
            "ttft": reply.ttft,
        }

    async with Client(server.url) as client:
        rows = list(await tqdm.gather(*(one(client, *each) for each in asked), desc="trace", unit="request"))
    rows[-1]["computed_by_server"] = server.status()["computed_tokens"] - before
    return rows


def unbounded(prompts: Sequence[Sequence[int]]) -> list[int]:
    """What a cache that forgets nothing leaves to be computed of each prompt, its last token in any case."""
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
    total = sum(row["prompt_tokens"] for row in rows)
    least = sum(row["unbounded_computed"] for row in rows)
    computed = rows[-1]["computed_by_server"]
    table = [
        {
            "trace": rows[0]["trace"],
            "requests": len(rows),
            "prompt_tokens": total,
            "shared": 1 - least / total,
            "unbounded": least,
            "computed": computed,
            "ttft": [row["ttft"] for row in rows],
        }
    ]
    show(
        table,
        "trace requests prompt_tokens shared:% unbounded computed ttft:s",
        "Prompt tokens computed for a trace of conversations",
    )
    return {
        "computed_over_unbounded_cache": computed / least,
        "trace": {
            "source": rows[0]["trace"],
            "requests": len(rows),
            "prompt_tokens": total,
            "shared": 1 - least / total,
        },
    }, []
