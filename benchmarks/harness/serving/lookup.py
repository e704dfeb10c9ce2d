"""Prompt lookup in a server: an agent's edit of a file, most of which the answer repeats, and text without repeats.

A small model would not write the edited file by itself: its answer is held to it by the schema of `response_format`,
and the model chooses which tokens it is cut into. With lookup and without take turns on one server, by the requests'
field.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import product
from typing import Any

from tqdm import tqdm

from ..charts import Chart
from ..document import Passages
from ..launch import Rows, Summary
from ..links import ROOT
from ..publish import show
from ..statistics import paired_ratio
from .server import Client, Reply, megakv_server

SOURCES = ("megakv/serving/prefix_tree.py", "megakv/cache/segments.py", "megakv/serving/turns.py")
"""Files that are edited, and whose lines come in the place of others."""
REPEATED = 0.8
"""Part of an edited file's tokens that were in the file before."""
HUNK = 6
"""Lines that are replaced in one place, at most."""
STREAMS = (1, 4)
DRAWN = {"temperature": 1.0}
ROOM = 1.5
"""Tokens that an answer may have for each of the file: the model may cut it into other ones than the tokenizer."""

Ask = Callable[[Client, dict[str, Any]], Awaitable[Reply]]


def edited(passages: Passages, length: int) -> tuple[str, str, float]:
    """A file of about so many tokens, what an edit makes of it, and which part of that the file has."""
    random = passages.random
    texts = [(ROOT / source).read_text().splitlines() for source in random.sample(SOURCES, len(SOURCES))]

    def count(line: str) -> int:
        return len(passages.tokenizer(line + "\n", add_special_tokens=False)["input_ids"])

    lines = list[str]()
    while sum(map(count, lines)) < length:
        lines.append(texts[0][len(lines) % len(texts[0])])
    sizes, before = list(map(count, lines)), "\n".join(lines)
    others, changed = [line for text in texts[1:] for line in text if line.strip()], set[int]()
    new, kept = 0, sum(sizes)
    while kept > REPEATED * (kept + new):
        first = random.randrange(len(lines))
        for at in {*range(first, min(first + random.randint(1, HUNK), len(lines)))} - changed:
            lines[at] = random.choice(others)
            changed.add(at)
            new, kept = new + count(lines[at]), kept - sizes[at]
            if kept <= REPEATED * (kept + new):
                break
    return before, "\n".join(lines), kept / (kept + new)


def edit(passages: Passages, length: int) -> tuple[Ask, float]:
    """A request for an edit, and which part of the answer repeats the file."""
    before, after, repeated = edited(passages, length)
    schema = {"type": "object", "properties": {"content": {"const": after}}, "required": ["content"]}
    schema["additionalProperties"] = False
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "edit", "schema": schema}}}
    asked = f"Edit this file, and answer with all of it.\n{json.dumps({'content': before}, separators=(',', ':'))}"

    def ask(client: Client, how: dict[str, Any]) -> Awaitable[Reply]:
        return client.chat(asked, int(ROOM * length), {"temperature": 0.0, **fields, **how})

    return ask, repeated


def draw(passages: Passages, new_tokens: int) -> tuple[Ask, float]:
    """A request for text that is drawn, in which little comes twice."""
    prompt, seed = passages.prompt(200), passages.random.randrange(2**31)

    def ask(client: Client, how: dict[str, Any]) -> Awaitable[Reply]:
        return client.complete(prompt, new_tokens, sampling={**DRAWN, "seed": seed, **how})

    return ask, 0.0


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each kind of answers and number of streams."""
    with megakv_server(arguments) as server:
        return asyncio.run(_measured(server.url, arguments))


async def _measured(url: str, arguments: argparse.Namespace) -> Rows:
    passages, rows = Passages(arguments.model, arguments.seed), list[dict[str, Any]]()
    kinds = {"edit": partial(edit, length=arguments.file), "no repeats": partial(draw, new_tokens=arguments.drawn)}
    ways: dict[str, dict[str, Any]] = {"without": {"prompt_lookup": 0}, "with": {}}
    async with Client(url) as client:
        # The server learns how long passes take.
        await draw(passages, 32)[0](client, {})
        for streams, (kind, make) in tqdm([*product(STREAMS, kinds.items())], desc="lookup"):
            row: dict[str, Any] = {"kind": kind, "streams": streams, "tokens_equal": True}
            row |= {name: [] for way in ways for name in (f"{way}_rate", f"{way}_tokens")} | {"repeated": []}
            for number in range(arguments.repeats):
                asks = [make(passages) for _ in range(streams)]
                row["repeated"] += [repeated for _, repeated in asks]
                texts: list[list[tuple[str, int]]] = []
                for way in [*ways][:: -1 if number % 2 else 1]:
                    replies = await asyncio.gather(*(ask(client, ways[way]) for ask, _ in asks))
                    # From when all have begun.
                    began, ended = max(r.stamps[0] for r in replies), max(r.stamps[-1] for r in replies)
                    tokens = sum(stamp > began for reply in replies for stamp in reply.stamps)
                    row[f"{way}_rate"].append(tokens / (ended - began))
                    row[f"{way}_tokens"].append(tokens)
                    texts.append([(reply.text, len(reply.stamps)) for reply in replies])
                row["tokens_equal"] &= texts[0] == texts[1]
            rows.append(row)
    return rows


def report(rows: Rows) -> tuple[Summary, list[Chart]]:
    """How many times as many tokens come in a second with lookup, medians over rounds."""
    summary: Summary = {"tokens_equal": all(row["tokens_equal"] for row in rows)}
    for row in rows:
        ratio = paired_ratio(row["with_rate"], row["without_rate"])
        row["speedup"] = ratio.value
        summary.setdefault(row["kind"], {})[str(row["streams"])] = ratio.to_json()
    show(rows, "kind streams repeated:% without_rate with_rate speedup tokens_equal", "Prompt lookup")
    return {"lookup": summary}, []
