"""Search for the best partitions of prompts: what every rank of ``megakv search-partition`` runs.

On several hosts start them by hand:
``deepspeed --hostfile FILE --module megakv.launcher.search --model DIR --config X.json ...``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import megakv
from megakv.base.partition import Partition, from_fractions, to_fractions
from megakv.costmodel.hardware import load_profile
from megakv.costmodel.shape import ModelShape
from megakv.distributed.launchers import read_launch
from megakv.engine.config import MegaKVConfig
from megakv.launcher.commands.search_partition import (
    add_arguments,
    check_search,
    default_unit,
    picture_path,
    read_contexts,
    search_config,
)
from megakv.launcher.passes import TimedPasses
from megakv.launcher.process import own_rank, rank_arguments
from megakv.runahead.chain_search import best_partition
from megakv.runahead.figure import draw_searches
from megakv.runahead.grid import Grid
from megakv.runahead.search import PartitionSearch, SearchResult, Trial
from megakv.runahead.table import ChainIdentity, LookupTable, TableEntry, load_table

FINALISTS, ROUNDS = 4, 3


class Desk:
    """Rank 0's part: it searches and writes."""

    def __init__(self, arguments: argparse.Namespace, chain: ChainIdentity, shape: ModelShape, passes: TimedPasses):
        self._arguments = arguments
        self._chain = chain
        self._shape = shape
        self._passes = passes
        self._profile = load_profile(arguments.profile, setting="--profile") if arguments.profile is not None else None
        self._how: dict[str, Any] = {"tp_size": chain.tp, "kv": chain.kv, "chunk_tokens": chain.chunk_tokens}
        self._table: LookupTable | None = None
        if Path(arguments.table).exists():
            self._table = load_table(arguments.table, setting="--table")
            if differences := self._table.chain.differences(chain):
                raise ValueError(
                    f"--table {arguments.table} was searched elsewhere: {'; '.join(differences)}: name another file"
                )

    def run(self, contexts: Sequence[int]) -> list[SearchResult]:
        """Search for all lengths, writing the table after each; then the picture."""
        results = []
        for number, context in enumerate(contexts, start=1):
            result = self._search(context, f"{context} tokens ({number} of {len(contexts)})")
            results.append(result)
            entry = TableEntry(
                context=context,
                fractions=to_fractions(result.partition),
                ttft_s=result.seconds,
                even_ttft_s=result.even_seconds,
                evaluations=result.evaluations,
            )
            table = self._table or LookupTable(chain=self._chain, entries=(entry,))
            self._table = table.with_entry(entry)
            self._table.save(self._arguments.table)
        title = f"Partition search, {self._arguments.model}, {self._chain.ranks} ranks, kv {self._chain.kv}"
        draw_searches(picture_path(self._arguments), results, title=title)
        return results

    def _search(self, context: int, name: str) -> SearchResult:
        self._passes.begin(context)
        best = math.inf
        with tqdm(desc=name, unit="partition", smoothing=0.1) as bar:

            def record(trial: Trial, left: int) -> None:
                nonlocal best
                best = min(best, trial.seconds)
                bar.total = bar.n + 1 + left
                bar.update(1)
                bar.set_postfix_str(f"best {best:.3f} s, stride {trial.stride}")

            ranks = self._chain.ranks
            grid = Grid(context, ranks, self._arguments.step or default_unit(context, ranks))
            return PartitionSearch(
                grid,
                self._passes.seconds,
                seeds=self._seeds(context),
                full_grid=self._arguments.full_grid,
                finalists=FINALISTS,
                rounds=ROUNDS,
                record=record,
            ).run()

    def _seeds(self, context: int) -> tuple[Partition, ...]:
        """Where the best is expected: by the cost model, and by the neighbours that the table has."""
        seeds: list[Partition] = []
        if self._profile is not None:
            seeds.append(best_partition(self._profile, self._shape, context, self._chain.ranks, **self._how))
        if self._table is not None:
            fractions = self._table.fractions(context) or self._table.nearest(context).fractions
            seeds.append(from_fractions(fractions, context))
        return tuple(seeds)


def print_results(results: Sequence[SearchResult]) -> None:
    """The table that a user sees at the end."""
    print(f"{'tokens':>8} {'TTFT s':>9} {'even s':>9} {'gain':>6} {'measured':>9}  partition", flush=True)
    for result in results:
        gain = result.even_seconds / result.seconds
        parts = " / ".join(map(str, result.partition))
        print(
            f"{sum(result.partition):>8} {result.seconds:>9.4f} {result.even_seconds:>9.4f} {gain:>6.2f} "
            f"{result.evaluations:>9}  {parts}",
            flush=True,
        )


def main() -> None:
    """Entry of every rank."""
    with rank_arguments(__doc__, add_arguments) as arguments:
        torch.set_num_threads(arguments.threads)
        config = search_config(arguments, read_launch().world_size)
        if own_rank() == 0:
            # The files are on its host, maybe on no other.
            check_search(arguments, config)
        with megakv.init_inference(arguments.model, config) as engine:
            search(engine, config, arguments)


def search(
    engine: megakv.MegaKVEngine, config: MegaKVConfig, arguments: argparse.Namespace
) -> list[SearchResult] | None:
    """Search on an engine, and print what was found; rank 0 returns it.

    Every rank must call it; what fails on one ends it on all.
    """
    section = config.megakv.runahead
    with engine.agreement.call():
        comm = engine._comm
        shape = ModelShape.from_config(engine.module.config, dtype=engine.module.dtype)
        chain = ChainIdentity.of(comm, shape, kv=section.kv, chunk_tokens=section.chunk_tokens)
        passes = TimedPasses(engine, comm, arguments.repeats)
        if comm.mesh.rank != 0:
            passes.follow()
            return None
        results = Desk(arguments, chain, shape, passes).run(read_contexts(arguments.contexts))
        passes.end()
    print_results(results)
    return results


if __name__ == "__main__":
    main()
