"""Streams beside a long prompt, and many streams at a time: MegaKV's server, and vLLM's with as many threads."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from megakv.base.errors import MegaKVError

from ..charts import Chart, lines
from ..document import Passages
from ..launch import Rows, Summary
from ..publish import show
from ..rivals import environment_of
from .server import GREEDY, Client, Reply, Server, VllmServer, megakv_server

STREAM_PROMPT, SHORT_PROMPT = 32, 50
ENDLESS = 3000  # Tokens that a stream asks for: more than come before it is closed
SETTLED = 8  # Tokens of every stream before the long prompt is sent; as many say how fast streams are alone
SHORT_AT = (0.25, 0.6)  # Where of the prompt a short request comes
SHARES = (0.0, 0.54)
"""Parts of the time that decoding keeps. A token takes longer while prompts are read, by the streams' contexts alone:
half of the time would be less than half of the rate."""
PROMPT, CHAT_PROMPT, LEAST_REQUESTS = 64, 512, 4
SAMPLED, WAYS = {"temperature": 0.7, "top_p": 0.9}, (False, True)
PATIENCE_S = 900.0
RATES = "server streams sampled tokens_per_second over_one over_greedy"


# Streams that wait for a token while a long prompt of another is read, and how much longer its reading takes


def measure_gaps(arguments: argparse.Namespace) -> Rows:
    """A row for each round at each share of the time that decoding keeps."""
    rows: Rows = []
    for share in SHARES:
        with megakv_server(arguments, "--decode-share", share) as server:
            found = asyncio.run(gaps(server.url, arguments, progress=True))
        rows += [{"server": "megakv", "decode_share": share, "max_gap_s": arguments.max_gap, **row} for row in found]
    return rows


async def gaps(url: str, arguments: argparse.Namespace, *, progress: bool) -> Rows:
    """The prompt alone, and beside streams, each time another one."""
    passages, length = Passages(arguments.model, arguments.seed), arguments.prompt
    found = []
    async with Client(url) as client:
        # The server learns how long passes take.
        await client.complete(passages.prompt(length // 4), 8)
        for number in range(arguments.repeats):
            alone = await client.complete(passages.prompt(length), 1)
            row = {"round": number, "context": length, "alone_seconds": alone.ttft, "streams": arguments.streams}
            found.append(row | await _beside_streams(client, passages, row, progress=progress))
    return found


async def _beside_streams(client: Client, passages: Passages, row: dict[str, Any], *, progress: bool) -> dict[str, Any]:
    """A round: streams that go on, the prompt, and short requests while it is read."""
    streams, long, short = [Reply() for _ in range(row["streams"])], Reply(), [Reply() for _ in SHORT_AT]

    def all_answered(_: Reply) -> bool:
        return bool(long.stamps) and all(each.stamps for each in short)

    async def later(prompt: list[int], seconds: float, into: Reply) -> None:
        await asyncio.sleep(seconds)
        await client.complete(prompt, 1, into=into)

    async with asyncio.TaskGroup() as group:
        for stream in streams:
            prompt = passages.prompt(STREAM_PROMPT)
            group.create_task(client.complete(prompt, ENDLESS, into=stream, leaves=all_answered))
        while min(len(stream.stamps) for stream in streams) < 2 * SETTLED:
            await asyncio.sleep(0.01)
        group.create_task(client.complete(passages.prompt(row["context"]), 1, into=long, progress=progress))
        for part, reply in zip(SHORT_AT, short, strict=True):
            group.create_task(later(passages.prompt(SHORT_PROMPT), part * row["alone_seconds"], reply))
    began, ended = long.sent, long.stamps[0]
    pairs = [list(itertools.pairwise(stream.stamps)) for stream in streams]
    waits = [[after - before for before, after in own if after > began and before < ended] for own in pairs]
    alone = [after - before for own in pairs for before, after in own[SETTLED - 1 :] if after <= began]
    every = [gap for each in waits for gap in each]
    chunk = median(every)
    return {
        "seconds": long.ttft,
        "gaps": waits,
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


def report_gaps(rows: Rows) -> tuple[Summary, list[Chart]]:
    """The longest gap of all rounds over the time of reading, and what reading takes over what it takes alone."""
    for row in rows:
        row["gap_over_reading"] = row["longest_gap"] / row["seconds"]
        row["reading_over_alone"] = row["seconds"] / row["alone_seconds"]
    columns = "server decode_share context streams alone_seconds:s seconds:s reading_over_alone longest_gap:ms "
    show(rows, columns + "chunk_seconds:ms short_ttft:ms rate_kept:%", "A prompt that is read beside streams")
    plain, shared = ([row for row in rows if bool(row["decode_share"]) == kept] for kept in (False, True))
    summary: Summary = {
        "longest_gap_over_prefill": max(row["gap_over_reading"] for row in plain),
        "reading_over_alone": median(row["reading_over_alone"] for row in plain),
        "short_ttft_chunks": max(each for row in plain for each in row["short_ttft_chunks"]),
    }
    if shared:
        summary["at_decode_share"] = {
            "decode_share": shared[0]["decode_share"],
            "rate_kept": min(row["rate_kept"] for row in shared),
            "reading_over_alone": median(row["reading_over_alone"] for row in shared),
        }
    # A stream's gaps over time while the prompt is read: of the first round of each server.
    drawn = [
        {"what": f"{row['server']}, decode share {row['decode_share']:g}", "at": after, "gap": after - before}
        for row in rows if not row["round"] for before, after in itertools.pairwise(row["first_stream"])
    ]  # fmt: skip
    words = {
        "title": "A stream while another's prompt is read", "x_label": "s", "y_label": "ms from a token to the next",
        "subtitle": f"{rows[0]['context']:,} tokens are sent at 0 s; {rows[0]['streams']} streams",
    }  # fmt: skip
    small: Any = {"looks": lambda row: {"marker": ".", "markersize": 3}, "log_x": False}
    return summary, [lines("gaps", drawn, "at", "gap", "what", scale=1e3, **small, **words)]


# Tokens per second of many streams at a time, over those of one; of the likeliest tokens, and of drawn ones


def measure_throughput(arguments: argparse.Namespace) -> Rows:
    """A row for each number of streams, and way to choose tokens."""
    with megakv_server(arguments) as server:
        return [{"server": "megakv", **row} for row in asyncio.run(rates(server.url, arguments))]


async def rates(url: str, arguments: argparse.Namespace) -> Rows:
    """A row for each number of streams and way to choose tokens: as many requests as streams, at least a few."""
    passages, asked = Passages(arguments.model, arguments.seed), list(itertools.product(arguments.concurrent, WAYS))
    found: dict[tuple[int, bool], Rows] = {(streams, sampled): [] for streams, sampled in asked}
    async with Client(url) as client:
        await asyncio.gather(*(client.complete(passages.prompt(PROMPT), 8) for _ in range(4)))
        for _ in range(arguments.repeats):
            for streams, sampled in asked:
                prompts = [passages.prompt(PROMPT) for _ in range(max(streams, LEAST_REQUESTS))]
                found[streams, sampled].append(await _burst(client, arguments.new_tokens, prompts, streams, sampled))
    return [
        {
            **{"streams": streams, "sampled": sampled, "prompt": PROMPT, "new_tokens": arguments.new_tokens},
            "tokens_per_second": median(each["tokens_per_second"] for each in rounds),
            "rounds": rounds,
        }
        for (streams, sampled), rounds in found.items()
    ]


async def _burst(
    client: Client, new_tokens: int, prompts: Sequence[list[int]], streams: int, sampled: bool
) -> dict[str, Any]:
    """Answers to all prompts, so many at a time."""
    free = asyncio.Semaphore(streams)

    async def one(prompt: list[int]) -> dict[str, Any]:
        async with free:
            reply = await client.complete(prompt, new_tokens, sampling=SAMPLED if sampled else GREEDY)
        return {"ttft": reply.ttft, "seconds": reply.stamps[-1] - reply.sent, "tokens": len(reply.stamps)}

    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - began
    tokens = sum(answer["tokens"] for answer in answers)
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "answers": answers}


def report_throughput(rows: Rows) -> tuple[Summary, list[Chart]]:
    """Over one stream's rate, by the number of streams; the rate of drawn tokens over the likeliest ones'."""
    greedy, sampled = ([row for row in rows if row["sampled"] == drawn] for drawn in (False, True))
    for row, like in zip(sampled, greedy, strict=True):
        row["over_greedy"] = row["tokens_per_second"] / like["tokens_per_second"]
        row["over_one"] = row["tokens_per_second"] / sampled[0]["tokens_per_second"]
        like["over_one"] = like["tokens_per_second"] / greedy[0]["tokens_per_second"]
    show(rows, RATES, "Tokens per second")
    over_one = {str(row["streams"]): row["over_one"] for row in greedy}
    over_greedy = {str(row["streams"]): row["over_greedy"] for row in sampled}
    return {"throughput_over_one": over_one, "sampled_over_greedy": over_greedy}, []


def measure_vllm(arguments: argparse.Namespace) -> Rows:
    """Rows of both loads, as MegaKV's."""
    with VllmServer(arguments) as server:
        waits = asyncio.run(gaps(server.url, arguments, progress=False))
        speeds = asyncio.run(rates(server.url, arguments))
    found = [{"server": "vllm", "load": "gaps", "decode_share": 0.0, **row} for row in waits]
    return [*found, *({"server": "vllm", "load": "throughput", **row} for row in speeds)]


def report_vllm(rows: Rows) -> tuple[Summary, list[Chart]]:
    """Report vLLM's rows as MegaKV's parts do theirs."""
    waits, speeds = ([row for row in rows if row["load"] == load] for load in ("gaps", "throughput"))
    own, charts = report_gaps(waits)
    report_throughput(speeds)
    own["alone_seconds"] = [row["alone_seconds"] for row in waits]
    for name, sampled in (("tokens_per_second", False), ("sampled_tokens_per_second", True)):
        own[name] = {str(row["streams"]): row["tokens_per_second"] for row in speeds if row["sampled"] == sampled}
    return {"vllm": own}, charts


# What guidellm, a client that others measure servers with, says of both servers: of the same requests


def measure_guidellm(arguments: argparse.Namespace) -> Rows:
    """A row for each server and number of streams."""
    python, rows = environment_of("guidellm"), []
    for name in ("megakv", "vllm"):
        with megakv_server(arguments) if name == "megakv" else VllmServer(arguments) as server:
            # Of other prompts: both servers keep what they have read.
            _guidellm(python, server, arguments, 1, seed=arguments.seed)
            for streams in tqdm(arguments.concurrent, desc=f"guidellm, {name}"):
                found = _guidellm(python, server, arguments, streams, seed=arguments.seed + streams)
                rows.append({"server": name, **found})
    return rows


def _guidellm(
    python: Path, server: Server, arguments: argparse.Namespace, streams: int, *, seed: int
) -> dict[str, Any]:
    requests = max(streams, LEAST_REQUESTS)
    with tempfile.TemporaryDirectory(prefix="megakv-benchmark-") as folder:
        path = Path(folder) / "report.json"
        tokens = f"prompt_tokens={CHAT_PROMPT},output_tokens={arguments.new_tokens}"
        options = {
            "--backend": f"kind=openai_http,target={server.url}",
            "--profile": f"kind=concurrent,streams={streams}",
            "--constraint": f"kind=max_requests,count={requests}",
            "--tokenizer": f"kind=huggingface_auto,model={arguments.model}",
            "--data": f"kind=synthetic_text,{tokens}",
            "--seed": f"kind=static,value={seed}",
            "--output": f"kind=json,path={path}",
        }
        command = [str(python.parent / "guidellm"), "run", "--disable-console"]
        command += [word for option in options.items() for word in option]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environ, timeout=PATIENCE_S)
        if done.returncode or not path.exists():
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise MegaKVError(f"guidellm failed: {said[-500:]}")
        (found,) = json.loads(path.read_text())["benchmarks"]
    answers: Sequence[dict[str, Any]] = found["requests"]["successful"]
    if len(answers) < requests:
        raise MegaKVError(f"{requests - len(answers)} of {requests} of guidellm's requests failed")
    place = {"streams": streams, "prompt": CHAT_PROMPT, "new_tokens": arguments.new_tokens, "requests": requests}
    return {
        **place,
        "seconds": found["duration"],
        "tokens_per_second": sum(answer["output_tokens"] for answer in answers) / found["duration"],
        "ttft_ms": [answer["time_to_first_token_ms"] for answer in answers],
        "itl_ms": [answer["inter_token_latency_ms"] for answer in answers],
    }


def report_guidellm(rows: Rows) -> tuple[Summary, list[Chart]]:
    """Medians of both servers, and MegaKV's over vLLM's."""
    for row in rows:
        row["ttft"], row["itl"] = 1e-3 * median(row["ttft_ms"]), 1e-3 * median(row["itl_ms"])
    names = ("tokens_per_second", "ttft", "itl")
    show(rows, "server streams prompt new_tokens tokens_per_second ttft:ms itl:ms", "By guidellm's client")
    own, other = ({row["streams"]: row for row in rows if row["server"] == name} for name in ("megakv", "vllm"))
    over = {str(key): {name: row[name] / other[key][name] for name in names} for key, row in own.items()}
    return {"guidellm_over_vllm": over}, []
