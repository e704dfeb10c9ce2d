"""A token of two context-parallel ranks of one thread, against one rank that has both threads: the same cores.

Of one sequence, and of several at a time.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from tqdm import tqdm

from .charts import groups
from .launch import Rows, Summary, free_port
from .publish import show
from .statistics import median, paired_ratio

RANKS = 2
STEPS = 16


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each type and batch: seconds per token of each round, in which both take their turn."""
    rows = []
    for dtype in arguments.dtypes:
        with ExitStack() as owned:
            worlds = {"cp2_seconds": _start(owned, RANKS, 1, dtype, arguments.context)}
            worlds["seconds"] = _start(owned, 1, RANKS, dtype, arguments.context)
            for batch in arguments.batches:
                seconds: dict[str, list[float]] = {name: [] for name in worlds}
                for index in tqdm(range(arguments.repeats + 1), desc=f"decoding, {dtype}, batch {batch}"):
                    for name, pipes in worlds.items():
                        for pipe in pipes:
                            pipe.send((batch, STEPS))
                        # All ranks are at a token's end at the same time.
                        taken = [pipe.recv() for pipe in pipes][0]
                        if index:
                            seconds[name].append(median(taken).value)
                rows.append({"dtype": dtype, "context": arguments.context, "batch": batch, **seconds})
    return rows


def _start(owned: ExitStack, ranks: int, threads: int, dtype: str, context: int) -> list[Connection[Any, Any]]:
    """Processes of one world; they end when what is said to them has an end."""
    port, spawn, pipes, processes = free_port(), mp.get_context("spawn"), [], []
    for rank in range(ranks):
        own, other = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(other, rank, ranks, threads, port, dtype, context), daemon=True)
        process.start()
        other.close()
        processes.append(process)
        pipes.append(own)
    # All are told before any is waited for: no rank leaves alone.
    for process in processes:
        owned.callback(process.join)
    for own in pipes:
        owned.callback(own.close)
    for pipe in pipes:
        pipe.recv()
    return pipes


def _serve(
    pipe: Connection[Any, Any], rank: int, ranks: int, threads: int, port: int, dtype: str, context: int
) -> None:
    """One rank: times of as many steps as it is told, over a cache of random keys and values."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import megakv

    from .limits_around import SMOLLM2, timed
    from .models import DTYPES, drawn_model, random_ids, sharded_cache, without_stop
    from .world import join_world

    world = join_world(threads, shared_memory=False, timeout_s=600.0)
    with torch.no_grad():
        model = without_stop(drawn_model(SMOLLM2, DTYPES[dtype]))
        batch = 0
        section = {"context_parallel": {"size": ranks, "decode": "tensor"}}
        with megakv.init_inference(model, {"dtype": dtype, "megakv": section}) as engine:
            pipe.send(None)
            while True:
                try:
                    wanted, steps = pipe.recv()
                except EOFError:
                    break
                if wanted != batch:
                    batch = wanted
                    ids = random_ids(SMOLLM2.vocab_size, context + 1, torch.device("cpu"), batch)
                    shard = sharded_cache(model, world, batch=batch, tokens=context)
                shard.cut_back(context)
                pipe.send(timed(partial(engine.generate_into, shard), ids, steps))
    world.leave()


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Milliseconds per token and their ratios, which are put into the rows; and the chart."""
    for row in rows:
        row["ratio"] = paired_ratio(row["cp2_seconds"], row["seconds"]).to_json()
    show(
        rows,
        "dtype context batch seconds:ms cp2_seconds:ms ratio",
        "A step of 1 rank x 2 threads, and CP 2 x 1 thread",
    )
    single: Summary = {row["dtype"]: row["ratio"]["value"] for row in rows if row["batch"] == 1}
    summary = {
        "ttit_cp2_over_one": single,
        "step_cp2_over_one": {f"{row['dtype']}, batch {row['batch']}": row["ratio"]["value"] for row in rows},
    }
    drawn = [
        {"case": f"{row['dtype']}, batch {row['batch']}", "what": what, "ms": [1e3 * each for each in row[name]]}
        for row in rows
        for what, name in (("1 rank x 2 threads", "seconds"), ("CP 2 x 1 thread", "cp2_seconds"))
    ]
    words = {
        "title": "A step on two cores",
        "subtitle": f"SmolLM2's shape, {rows[0]['context']:,} cached tokens; median, 95% interval",
        "y_label": "ms per step, less is better",
    }
    return summary, [groups("decoding", drawn, "case", "what", "ms", **words)]
