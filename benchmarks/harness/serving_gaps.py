"""How long streams wait for a token while a long prompt of another is read, and how much longer its reading takes."""

from __future__ import annotations

import argparse
import asyncio
from statistics import median
from typing import Any

from .charts import Chart, lines
from .launch import Rows, Summary
from .publish import show
from .serving_client import Client, Reply
from .serving_prompts import Passages
from .serving_server import megakv_server

STREAM_PROMPT, SHORT_PROMPT = 32, 50
ENDLESS = 3000
"""Tokens that a stream asks for: more than come before it is closed."""
SETTLED = 8
"""Tokens of every stream before the long prompt is sent; as many say how fast streams are alone."""
SHORT_AT = (0.25, 0.6)
"""Where of the prompt a short request comes."""
SHARES = (0.0, 0.54)
"""Parts of the time that decoding keeps. A token takes longer while prompts are read, by the streams' contexts alone:
half of the time would be less than half of the rate."""


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each round at each share of the time that decoding keeps."""
    rows: Rows = []
    for share in SHARES:
        with megakv_server(arguments, "--decode-share", share) as server:
            found = asyncio.run(rounds(server.url, arguments, progress=True))
        rows += [{"server": "megakv", "decode_share": share, "max_gap_s": arguments.max_gap, **row} for row in found]
    return rows


async def rounds(url: str, arguments: argparse.Namespace, *, progress: bool) -> Rows:
    """The prompt alone, and beside streams, each time another one."""
    passages = Passages(arguments.model, arguments.seed)
    async with Client(url) as client:
        # The server learns how long passes take.
        await client.complete(passages.prompt(arguments.prompt // 4), 8)
        found = []
        for number in range(arguments.repeats):
            alone = await client.complete(passages.prompt(arguments.prompt), 1)
            row = await _beside_streams(client, passages, arguments, alone.ttft, progress=progress)
            found.append({"round": number, "context": arguments.prompt, "alone_seconds": alone.ttft, **row})
    return found


async def _beside_streams(
    client: Client, passages: Passages, arguments: argparse.Namespace, alone_seconds: float, *, progress: bool
) -> dict[str, Any]:
    """A round: streams that go on, the prompt, and short requests while it is read."""
    streams = [Reply() for _ in range(arguments.streams)]
    long, short = Reply(), [Reply() for _ in SHORT_AT]
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(
                client.complete(
                    passages.prompt(STREAM_PROMPT),
                    ENDLESS,
                    into=stream,
                    leaves=lambda _: bool(long.stamps) and all(each.stamps for each in short),
                )
            )
        while min(len(stream.stamps) for stream in streams) < 2 * SETTLED:
            await asyncio.sleep(0.01)
        group.create_task(client.complete(passages.prompt(arguments.prompt), 1, into=long, progress=progress))
        for part, reply in zip(SHORT_AT, short, strict=True):
            group.create_task(_later(client, passages.prompt(SHORT_PROMPT), part * alone_seconds, reply))
    began, ended = long.sent, long.stamps[0]
    gaps = [
        [later - sooner for sooner, later in zip(stream.stamps, stream.stamps[1:], strict=False)
         if later > began and sooner < ended]
        for stream in streams
    ]  # fmt: skip
    alone = [
        later - sooner for stream in streams
        for sooner, later in zip(stream.stamps[SETTLED - 1 :], stream.stamps[SETTLED:], strict=False) if later <= began
    ]  # fmt: skip
    every = [gap for each in gaps for gap in each]
    chunk = median(every)
    return {
        "streams": arguments.streams,
        "seconds": long.ttft,
        "gaps": gaps,
        "alone_gaps": alone,
        "longest_gap": max(every),
        "chunk_seconds": chunk,
        "short_ttft": [each.ttft for each in short],
        "short_ttft_chunks": [each.ttft / chunk for each in short],
        # Of each stream's tokens in a second, while the prompt is read and before.
        "rate_kept": (len(every) / len(streams) / long.ttft) * (sum(alone) / len(alone)),
        "progress": [(at - began, read) for at, read in long.progress],
        "first_stream": [stamp - began for stamp in streams[0].stamps if began - 2 < stamp < ended + 2],
    }


async def _later(client: Client, prompt: list[int], seconds: float, into: Reply) -> None:
    await asyncio.sleep(seconds)
    await client.complete(prompt, 1, into=into)


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """The longest gap of all rounds over the time of reading, and what reading takes over what it takes alone."""
    for row in rows:
        row["gap_over_reading"] = row["longest_gap"] / row["seconds"]
        row["reading_over_alone"] = row["seconds"] / row["alone_seconds"]
    show(
        rows,
        "server decode_share context streams alone_seconds:s seconds:s reading_over_alone longest_gap:ms "
        "chunk_seconds:ms short_ttft:ms rate_kept:%",
        "A prompt that is read beside streams",
    )
    summary: Summary = {}
    if plain := [row for row in rows if row["decode_share"] == 0]:
        summary["longest_gap_over_prefill"] = max(row["gap_over_reading"] for row in plain)
        summary["reading_over_alone"] = median(row["reading_over_alone"] for row in plain)
        summary["short_ttft_chunks"] = max(each for row in plain for each in row["short_ttft_chunks"])
    if shared := [row for row in rows if row["decode_share"]]:
        summary["at_decode_share"] = {
            "decode_share": shared[0]["decode_share"],
            "rate_kept": min(row["rate_kept"] for row in shared),
            "reading_over_alone": median(row["reading_over_alone"] for row in shared),
        }
    return summary, [chart(rows)]


def chart(rows: Rows) -> Chart:
    """A stream's gaps over time while the prompt is read: of the first round of each server."""
    firsts = [row for row in rows if not row["round"]]
    drawn = [
        {"what": f"{row['server']}, decode share {row['decode_share']:g}", "at": later, "gap": later - sooner}
        for row in firsts
        for sooner, later in zip(row["first_stream"], row["first_stream"][1:], strict=False)
    ]
    words = {
        "title": "A stream while another's prompt is read",
        "subtitle": f"{rows[0]['context']:,} tokens are sent at 0 s; {rows[0]['streams']} streams",
        "x_label": "s",
        "y_label": "ms from a token to the next",
    }
    return lines("gaps", drawn, "at", "gap", "what", scale=1e3, looks=_small, log_x=False, **words)


def _small(row: Any) -> dict[str, Any]:
    return {"marker": ".", "markersize": 3}
