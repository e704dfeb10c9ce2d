"""The cases of `limits.py`: calls that take turns, and how much work each of them does.

The attention of the `host` to offloaded rows, against reading memory; a `ring` rank's on one device, against matrix
products, as if the other ranks were there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megakv.attention.partial import PartialAttention, Scoring
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import new_tokens
from megakv.offload.host_rank import HostRank, Queries
from megakv.offload.row_format import HeadShape

from .launch import Rows, Summary
from .models import DTYPES
from .publish import show, show_summary
from .statistics import median, paired_ratio
from .timing import Call, Watch, by_turns

HOST_HEADS, RING_HEADS = 32, (16, 1)
"""Query heads to which the host attends; query and KV heads of a ring's rank, as in Llama 3 405B on TP8."""


@dataclass(frozen=True)
class Case:
    """Calls by the name of their samples: MegaKV's ``seconds``, and the limit's ``limit_seconds``."""

    dtype: str
    name: str
    work: dict[str, float]  # By the same names: operations, or bytes
    calls: dict[str, Call]


def matrices(arguments: argparse.Namespace, dtype: str, device: torch.device) -> Call:
    """A product of two square matrices, by the device's own clock."""
    size, watch = arguments.matrix, Watch(device)
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(2))

    def multiply() -> float:
        with watch.span():
            torch.mm(a, b)
        return watch.seconds()

    return multiply


def host_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """One query token attends to one sequence's rows, by the offload engine's own thread, kernel and layout of rows."""
    dim = arguments.head_dim
    for dtype, kv_heads, threads in product(arguments.dtypes, arguments.kv_heads, arguments.threads):
        shape, kind = HeadShape(kv_heads, dim, dim), DTYPES[dtype]
        rows = torch.randn(max(1, arguments.megabytes * 10**6 // (shape.width * kind.itemsize)), shape.width).to(kind)
        # What a store of the offload engine says of its rows.
        store: Any = SimpleNamespace(dtype=kind, head_shape=shape, heads_of=shape.split, quantiser=None)
        reader = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        with closing(HostRank(threads)) as host, reader:
            host.queries = Queries(HOST_HEADS, dim, Scoring(dim**-0.5))
            # Every byte is looked at once, and nothing else.
            whole = rows.view(torch.int32).view(-1)
            calls: dict[str, Call] = {
                "seconds": partial(host.measure, store, [(0, rows)]),
                "limit_seconds": lambda reader=reader, whole=whole: reader.submit(whole.amax).result(),
            }
            yield Case(dtype, f"{kv_heads} KV heads, {threads} threads", dict.fromkeys(calls, rows.nbytes), calls)


def ring_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Every rank of a pass-KV ring in turn, its own part first, then others in order: the slowest one's time."""
    device, dim, (heads, kv_heads) = torch.device(arguments.device), arguments.head_dim, RING_HEADS
    for dtype, context, size in product(arguments.dtypes, arguments.contexts, arguments.ranks):
        tokens = new_tokens(np.ones((1, context), dtype=bool), np.arange(context)[None], 0)
        slots, watch = [each.slot for each in balanced(tokens, size).tokens], Watch(device)
        # Rows are tokens, as projections write them; a message holds whole heads one after the other.
        shape = {"device": device, "dtype": DTYPES[dtype]}
        q, k, v = (torch.randn(context, count, dim, **shape) for count in (heads, kv_heads, kv_heads))
        index = [torch.from_numpy(own).to(device) for own in slots]
        queries = [q[own].transpose(0, 1) for own in index]
        parts = [[each[own].transpose(0, 1).contiguous() for each in (k, v)] for own in index]

        def slowest(queries: Any = queries, parts: Any = parts, slots: Any = slots, watch: Watch = watch) -> float:
            seconds = []
            for rank in range(len(slots)):
                with watch.span():
                    attention = PartialAttention(queries[rank], slots[rank], Scoring(dim**-0.5))
                    for step in range(len(slots)):
                        source = (rank - step) % len(slots)
                        attention.add(*parts[source], slots[source])
                seconds.append(watch.seconds())
            return max(seconds)

        flops = 4 * heads * dim * (context * (context + 1) // 2) / size
        work = {"seconds": flops, "limit_seconds": 2 * arguments.matrix**3}
        calls: dict[str, Call] = {"seconds": slowest, "limit_seconds": matrices(arguments, dtype, device)}
        yield Case(dtype, f"{context} tokens, {size} ranks", work, calls)


PARTS = {"host": host_cases, "ring": ring_cases}


@torch.no_grad()
def measure(part: str, arguments: argparse.Namespace) -> Rows:
    """A row for each case: seconds of each round, in which everything takes its turn."""
    torch.set_num_threads(arguments.threads[-1])
    rows = []
    for case in tqdm(PARTS[part](arguments), desc=part, unit="case"):
        place = {"part": part, "dtype": case.dtype, "case": case.name, "work": case.work}
        rows.append({**place, **by_turns(case.calls, arguments.repeats)})
    return rows


def report(rows: Rows) -> Summary:
    """Shares of the limit's rate, which are put into the rows, and the lowest by type."""
    summary: Summary = {}
    for row in rows:
        part, work, case = row["part"], row["work"], f"{row['dtype']}, {row['case']}"
        for name in work:
            row[name.replace("seconds", "g_per_s")] = median([work[name] / each / 1e9 for each in row[name]]).value
        limit = [work["seconds"] / work["limit_seconds"] * each for each in row["limit_seconds"]]
        share = paired_ratio(limit, row["seconds"])
        row["share"] = share.to_json()
        summary.setdefault(f"{part}_share", {})[case] = row["share"]
        lowest = summary.setdefault(f"lowest_{part}_share", {})
        lowest[row["dtype"]] = min(lowest.get(row["dtype"], share.value), share.value)
    columns = "part dtype case seconds:ms g_per_s limit_g_per_s share"
    show(rows, columns, "Billions of operations of visible pairs, or bytes, a second; shares of the limit's")
    show_summary(summary, *(name for name in summary if name.startswith("lowest")))
    return summary
