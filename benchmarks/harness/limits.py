"""The cases of `limits.py`: calls that take turns, and how much work each of them does.

`attention` to a prompt's causal square, against the fastest library's product; `products` of one row with a model's
weights, against reading memory; `rates` of products of more rows, against the fastest library's; the `host`'s attention
to offloaded rows, against reading memory; a `ring` rank's attention on one device, against matrix products, as if the
other ranks were there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from megakv.attention.backends import attend_block, cpu_flash
from megakv.attention.partial import PartialAttention, Scoring
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import new_tokens
from megakv.offload.host_rank import HostRank, Queries
from megakv.offload.row_format import HeadShape
from megakv.weights.products import Products, libraries, rows_product

from .launch import Rows, Summary
from .models import DTYPES
from .publish import show, show_summary
from .statistics import median, paired_ratio
from .timing import Call, Watch, by_turns

SHAPES = (576, 576), (1536, 576), (576, 1536), (49152, 576), (4096, 4096)
"""Outputs and inputs: SmolLM2's queries, gate, down projection and output head, and a square of larger models."""
RATE_SHAPES = (576, 576), (1536, 576), (576, 1536), (4096, 4096)
HOST_HEADS, RING_HEADS = 32, (16, 1)
"""Query heads to which the host attends; query and KV heads of a ring's rank, as in Llama 3 405B on TP8."""


@dataclass(frozen=True)
class Case:
    """Calls by the name of their samples: MegaKV's ``seconds``, PyTorch's ``torch*``, the limit's ``limit_seconds``."""

    dtype: str
    name: str
    work: dict[str, float]  # By the same names: operations, or bytes
    calls: dict[str, Call]


def matrices(arguments: argparse.Namespace, dtype: str, device: torch.device) -> Call:
    """A product of two square matrices, by the fastest library there, and the device's own clock."""
    size, watch, multiply_by = arguments.matrix, Watch(device), torch.mm
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    if device.type == "cpu":
        rates = Products.measured(DTYPES[dtype]).rates[-1].flops
        multiply_by = libraries(DTYPES[dtype])[max(rates, key=lambda name: rates[name])]

    def multiply() -> float:
        with watch.span():
            multiply_by(a, b)
        return watch.seconds()

    return multiply


def attention_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    cases = product(arguments.dtypes, arguments.head_dims, arguments.groups, arguments.keys)
    for dtype, dim, group, keys in cases:
        kv_heads = arguments.heads // group
        heads, scale = kv_heads * group, dim**-0.5
        q = torch.randn(keys, heads, dim).to(DTYPES[dtype]).transpose(0, 1)
        k, v = (torch.randn(kv_heads, keys, dim).to(DTYPES[dtype]) for _ in range(2))
        calls: dict[str, Call] = {
            "seconds": partial(attend_block, q, k, v, scale, causal=True),
            "torch_seconds": partial(flash, q[None], k[None], v[None], 0.0, True, scale=scale),
            "limit_seconds": matrices(arguments, dtype, q.device),
        }
        if dtype != "fp32":
            calls["torch_float32_seconds"] = partial(cpu_flash, q, k, v, scale, causal=True)
        # Pairs that are visible, and no others.
        flops = 4 * dim * heads * keys * (keys + 1) // 2
        work = {**dict.fromkeys(calls, flops), "limit_seconds": 2 * arguments.matrix**3}
        yield Case(dtype, f"{heads}:{kv_heads} heads of {dim}, {keys} tokens", work, calls)


def product_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    read = torch.zeros(arguments.megabytes << 17, dtype=torch.int64)
    for threads, dtype, (outputs, inputs) in product(arguments.threads, arguments.dtypes, SHAPES):
        torch.set_num_threads(threads)
        kind = DTYPES[dtype]
        nbytes = outputs * inputs * kind.itemsize
        # So many that no cache holds them from one round to the next.
        count = max(1, (arguments.megabytes << 20) // nbytes)
        weights, x = [torch.randn(outputs, inputs).to(kind) for _ in range(count)], torch.randn(1, 1, inputs).to(kind)

        def of_all(function: Callable[..., Any], x: torch.Tensor = x, weights: Any = weights) -> object:
            return [function(x, weight) for weight in weights]

        calls: dict[str, Call] = {
            "seconds": partial(of_all, rows_product),
            "torch_seconds": partial(of_all, F.linear),
            "limit_seconds": read.sum,
        }
        work = {**dict.fromkeys(calls, count * nbytes), "limit_seconds": read.nbytes}
        yield Case(dtype, f"{outputs}x{inputs}, {threads} threads", work, calls)


def rate_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """What MegaKV takes for so many rows, and every library by itself, of which the fastest is the limit."""
    for threads, dtype, (outputs, inputs) in product(arguments.threads, arguments.dtypes, RATE_SHAPES):
        torch.set_num_threads(threads)
        kind = DTYPES[dtype]
        products, weight = Products.measured(kind), torch.randn(outputs, inputs).to(kind)
        for rows in arguments.rows:
            x = torch.randn(rows, inputs).to(kind)
            calls: dict[str, Call] = {"seconds": partial(rows_product, x, weight, None, products)}
            calls |= {
                f"{name.lower().removeprefix('py')}_seconds": partial(each, x, weight)
                for name, each in libraries(kind).items()
            }
            work = dict.fromkeys(calls, 2.0 * rows * outputs * inputs)
            yield Case(dtype, f"{rows} rows, {outputs}x{inputs}, {threads} threads", work, calls)


def host_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """One query token attends to one sequence's rows, by the offload engine's own thread, kernel and layout of rows."""
    dim = arguments.head_dims[-1]
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
    device, dim, (heads, kv_heads) = torch.device(arguments.device), arguments.head_dims[-1], RING_HEADS
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


PARTS = {
    "attention": attention_cases,
    "products": product_cases,
    "rates": rate_cases,
    "host": host_cases,
    "ring": ring_cases,
}


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
    """Shares of the limit's rate and speed-ups over PyTorch, which are put into the rows, and the lowest by type."""
    summary: Summary = {}
    for row in rows:
        part, work, case = row["part"], row["work"], f"{row['dtype']}, {row['case']}"
        if part == "rates":
            row["limit_seconds"] = min(
                (row[name] for name in work if name != "seconds"), key=lambda each: median(each).value
            )
            work["limit_seconds"] = work["seconds"]
        for name in work:
            row[name.replace("seconds", "g_per_s")] = median([work[name] / each / 1e9 for each in row[name]]).value
        limit = [work["seconds"] / work["limit_seconds"] * each for each in row["limit_seconds"]]
        found = {"share": paired_ratio(limit, row["seconds"])}
        if theirs := [row[name] for name in work if name.startswith("torch")]:
            found["speedup"] = paired_ratio(min(theirs, key=lambda each: median(each).value), row["seconds"])
        for name, ratio in found.items():
            row[name] = ratio.to_json()
            summary.setdefault(f"{part}_{name}", {})[case] = row[name]
            lowest = summary.setdefault(f"lowest_{part}_{name}", {})
            lowest[row["dtype"]] = min(lowest.get(row["dtype"], ratio.value), ratio.value)
    columns = "part dtype case seconds:ms g_per_s torch_g_per_s limit_g_per_s share speedup"
    for library in dict.fromkeys(name for row in rows for name in row["work"] if row["part"] == "rates"):
        if (column := library.replace("seconds", "g_per_s")) not in columns.split():
            columns += f" {column}"
    show(rows, columns, "Billions of operations of visible pairs, or bytes, a second; shares of the limit's")
    show_summary(summary, *(name for name in summary if name.startswith("lowest")))
    return summary
