"""Prompt tokens that are computed for a trace of conversations, over those that an unbounded prefix cache would.

Traces have Mooncake's format: a line for each request, with ids of its prompt's blocks. What is generated has the
published statistics of Mooncake's conversation trace (FAST '25): 12,035 prompt tokens in the mean, 85,401 at the 99th
percentile, 36.6% of them shared with earlier prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tqdm.asyncio import tqdm
from transformers import AutoConfig

from ..document import Passages
from ..launch import Rows, Summary
from ..publish import show
from .server import Client, Server, megakv_server

BLOCK = 512  # Tokens of a block
GOES_ON = 0.375
"""Share of requests that go on a conversation. This and what follows is fitted to the published statistics."""
FIRST, LATER, OUTPUT = (8.4, 1.2), (8.0, 1.1), (5.5, 0.8)
"""Mean and deviation of the logarithm of the length of a first turn, of what a later one adds, and of an answer."""
SYSTEM = 500  # Tokens with which all conversations begin
OPEN = 30  # Conversations that may go on
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


def generated(count: int, seed: int) -> list[TraceRequest]:
    """Conversations that begin alike and go on in turns."""
    return list(islice(_requests(Random(seed)), count))


def _requests(random: Random) -> Iterator[TraceRequest]:
    conversations: list[TraceRequest] = []
    blocks = SYSTEM // BLOCK + 1
    while True:
        before = random.randrange(len(conversations)) if conversations and random.random() < GOES_ON else None
        earlier = TraceRequest(0, 0, (0,)) if before is None else conversations[before]
        length = max(1, earlier.length + int(random.lognormvariate(*(FIRST if before is None else LATER))))
        # The last block of before was not full: its id is another one now. All begin with the system's.
        kept = earlier.blocks[: max(1, earlier.length // BLOCK)]
        more = range(blocks, blocks + max(0, -(-length // BLOCK) - len(kept)))
        blocks += len(more)
        request = TraceRequest(length, max(1, int(random.lognormvariate(*OUTPUT))), (*kept, *more))
        if before is None:
            conversations = [*conversations, request][-OPEN:]
        else:
            conversations[before] = request
        yield request


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each request."""
    count = arguments.trace_requests
    trace = read_trace(Path(arguments.trace), count) if arguments.trace else generated(count, arguments.seed)
    asked = prompts(trace, arguments)
    with megakv_server(arguments) as server:
        found = asyncio.run(_ask(server, asked))
    cold, source = unbounded([prompt for prompt, _ in asked]), arguments.trace or "generated"
    return [
        {"trace": source, "trace_tokens": request.length, "unbounded_computed": least, **row}
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
