"""Partitions that are searched on the ranks of a benchmark, as ``megakv search-partition`` does."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megakv
from megakv.costmodel.shape import ModelShape
from megakv.launcher.commands.search_partition import add_arguments
from megakv.launcher.passes import TimedPasses
from megakv.launcher.search import Desk
from megakv.runahead.partition import Partition, from_fractions
from megakv.runahead.search import SearchResult
from megakv.runahead.table import ChainIdentity, LookupTable, load_table

from .world import World


class Searches:
    """The lookup table of one chain. Every rank must make the same calls."""

    def __init__(
        self,
        engine: megakv.MegaKVEngine,
        world: World,
        *,
        table: Path,
        profile: str | None,
        step: int | None,
        patience: int | None,
        repeats: int,
    ):
        comm = self._comm = engine._comm
        self._shape = ModelShape.from_config(engine.module.config, dtype=engine.module.dtype)
        section = engine._config.megakv.runahead
        self._chain = ChainIdentity.of(comm, self._shape, kv=section.kv, chunk_tokens=section.chunk_tokens)
        self._passes = TimedPasses(engine, comm, repeats)
        self._world = world
        self._path = table
        self._options = {"--profile": profile, "--step": step, "--patience": patience, "--repeats": repeats}

    def search(self, context: int) -> SearchResult | None:
        """Find the partition of a length that the table does not have: what it came to, on rank 0."""
        known = context in [entry.context for entry in self._entries()]
        # Rank 0's view decides: another rank may see the file a moment later.
        if self._world.gather(known)[0]:
            return None
        result: SearchResult | None = None
        failure: Exception | None = None
        if self._world.rank != 0:
            self._passes.follow()
        else:
            try:
                desk = Desk(self._arguments(context), self._chain, self._shape, self._passes)
                (result,) = desk.run([context])
            except Exception as error:
                failure = error
            self._passes.end()
        self._comm.agree(failure)
        return result

    def _arguments(self, context: int) -> argparse.Namespace:
        """The command line of ``megakv search-partition`` for one length."""
        picture = self._path.with_name(f"{self._path.stem}-{context}.png")
        given = {"--model": "model", "--config": "config", "--contexts": context, "--table": self._path}
        options = {**given, "--png": picture, **self._options}
        words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
        parser = argparse.ArgumentParser()
        add_arguments(parser, ranks=False)
        return parser.parse_args(words)

    def partition(self, context: int) -> Partition:
        """The searched one."""
        return from_fractions(next(e.fractions for e in self._entries() if e.context == context), context)

    def predicted(self, context: int, spacing: int) -> Partition:
        """The one between its neighbours, of a table that only has multiples of `spacing` (Section 4.3)."""
        entries = tuple(entry for entry in self._entries() if entry.context % spacing == 0)
        fractions = LookupTable(chain=self._chain, entries=entries).fractions(context)
        assert fractions is not None, f"{context} tokens lie between no entries"
        return from_fractions(fractions, context)

    def _entries(self) -> tuple[Any, ...]:
        self._world.barrier()
        return load_table(self._path).entries if self._path.exists() else ()


def kept(result: SearchResult) -> dict[str, Any]:
    """A search as JSON."""
    return {**asdict(result), "trials": [trial.model_dump() for trial in result.trials]}
