"""The cases of `runahead.py`, measured by the ranks of one launch, and the searches for their partitions."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

import megakv
from megakv.base.partition import Partition, even, from_fractions
from megakv.launcher.search import search
from megakv.runahead.table import load_table

from ..methods import ContextParallel, Peers, Prefill
from ..models import random_ids
from ..noise import QUIET, Switch
from ..predictions import measured
from ..sampling import Agreement, Samples, measure
from ..world import World
from .plan import CHOSEN, NOISES, NOISY, Group

MAY_CHOOSE = ("runahead", "pass_kv", "pass_q")


class Searches:
    """Partitions searched as ``megakv search-partition`` does, and the table that they are written to."""

    def __init__(
        self, engine: megakv.MegaKVEngine, world: World, arguments: argparse.Namespace, table: Path, profile: str | None
    ):
        self._engine, self._world, self._path = engine, world, table
        self._options = {"step": arguments.search_step, "patience": arguments.search_patience}
        self._options |= {"repeats": arguments.search_repeats, "profile": profile, "full_grid": False}

    def search(self, context: int) -> None:
        """Find the partition of a length that the table does not have."""
        if self._world.gather(any(entry.context == context for entry in self._table().entries))[0]:
            return
        picture = str(self._path.with_name(f"{self._path.stem}-{context}.png"))
        words = {"model": "model", "contexts": [str(context)], "table": str(self._path), "png": picture}
        search(self._engine, self._engine._config, argparse.Namespace(**words, **self._options))

    def partition(self, context: int) -> Partition:
        return from_fractions(next(e.fractions for e in self._table().entries if e.context == context), context)

    def predicted(self, context: int, spacing: int) -> Partition:
        """The one between its neighbours, of a table that only has multiples of `spacing` (Section 4.3)."""
        table = self._table()
        entries = tuple(entry for entry in table.entries if entry.context % spacing == 0)
        fractions = table.model_copy(update={"entries": entries}).fractions(context)
        assert fractions is not None, f"{context} tokens lie between no entries"
        return from_fractions(fractions, context)

    def _table(self) -> Any:
        self._world.barrier()
        return load_table(self._path) if self._path.exists() else SimpleNamespace(entries=())


class CaseBench:
    """Measures one case after the other. Every rank must make the same calls; the model is whole on every rank."""

    def __init__(self, arguments: argparse.Namespace, group: Group, world: World, peers: Peers, folder: Path):
        self._arguments, self._group, self._world, self._peers = arguments, group, world, peers
        self._known = measured(world, peers.model.config, peers.model.dtype, arguments)
        self._profile: str | None = None
        if self._known is not None:
            # Engines read it from a file that all ranks see.
            self._profile = str(folder / "profile.json")
            if world.rank == 0:
                self._known.profile.save(Path(self._profile))
            world.barrier()
        self._table = folder / "table.json"
        self._searches = Searches(chain_engine(peers), world, arguments, self._table, self._profile)

    def measure(self, context: int) -> list[dict[str, Any]]:
        """The rows of one length of prompt; all methods must compute the first one's logits."""
        arguments, world, group = self._arguments, self._world, self._group
        for length in group.searched(arguments.methods, arguments.table_spacing, context):
            self._searches.search(length)
        names = group.methods(arguments.methods, context, arguments.table_spacing)
        ids = random_ids(arguments.vocab, context, world.device)
        # What auto may use of the table has changed since the last case.
        self._peers.drop("auto")
        runs = [(name, noise) for name in names for noise in (NOISES if group.noise and name in NOISY else (QUIET,))]
        switch = Switch(Path(arguments.switch), world.rank, world.size) if group.noise else None
        switched = [[partial(switch.next_run, name, noise)] if switch else [] for name, noise in runs]
        methods = [self._method(name, ids, *steps) for (name, _), steps in zip(runs, switched, strict=True)]
        least = min(arguments.repeats, arguments.least_repeats)
        limits = {"repeats": arguments.repeats, "least": least, "budget_s": arguments.cell_seconds}
        samples = measure(world, methods, Agreement(world, arguments.dtype), **limits)
        place = {"ranks": world.size, "kv_heads": group.kv_heads, "rate": group.rate, "context": context}
        rows = []
        for (name, noise), sample in zip(runs, samples, strict=True):
            row = sample.to_row(**place, noise=noise, **self._facts(name, context, sample))
            rows.append(row | {"predicted_s": self._predicted(row)})
        return rows

    def _predicted(self, row: Mapping[str, Any]) -> float | None:
        """Seconds; None beside a competing flow, which no formula knows."""
        if row["noise"] != QUIET:
            return None
        if row["method"] == "auto":
            return row["candidates_s"].get(CHOSEN.get(row["auto"]))
        partition = row["partition"] and tuple(row["partition"])
        return self._known and self._known.prefill(row["method"], row["context"], partition=partition)

    def _method(self, name: str, ids: Tensor, *switch: Callable[[], object]) -> Prefill:
        if name == "auto":
            # What a user has who searched: the table, and the profile where the table says nothing.
            chain = {"table": str(self._table)} if self._table.exists() else {}
            engine = self._peers.engine("auto", {"prefill": "auto", "profile": self._profile}, runahead=chain)
            return Prefill(name, ContextParallel(engine), ids, *switch)
        partition = self._partition(name, ids.shape[1])
        if partition is None:
            return self._peers.prefill(name, ids, *switch)
        engine = chain_engine(self._peers)
        return Prefill(name, ContextParallel(engine), ids, partial(engine.partitions.use, partition), *switch)

    def _partition(self, name: str, context: int) -> Partition | None:
        size = self._world.size
        match name:
            case "kvr_e":
                return even(context, size)
            case "one_rank":
                return (0,) * (size - 1) + (context,)
            case "kvr_s":
                return self._searches.partition(context)
            case "kvr_p":
                return self._searches.predicted(context, self._arguments.table_spacing)
        return None

    def _facts(self, name: str, context: int, sample: Samples) -> dict[str, Any]:
        partition, facts = self._partition(name, context), dict[str, Any](auto=None, candidates_s=None)
        if name == "auto":
            choice: Any = self._peers.engine("auto", {})._runtime.planner.choice
            if choice is None:
                # A prompt as short as that went the way of decoding.
                return {"auto": "tensor", "candidates_s": {}, "partition": None}
            facts = {"auto": chosen(sample.bytes_sent), "candidates_s": dict(choice.predicted_s)}
            if facts["auto"] == "runahead":
                partition = choice.partitions[0]
        return {**facts, "partition": partition and list(partition)}


def chain_engine(peers: Peers) -> megakv.MegaKVEngine:
    return peers.engine("chain", {"prefill": "runahead"}, runahead={"partition": "even"})


def chosen(bytes_sent: Sequence[Mapping[str, int]]) -> str:
    """Tell what `auto` chose by what went over the wire most: the last layer's few queries go round with any ring."""
    sent = sum(map(Counter, bytes_sent), Counter())
    return max(MAY_CHOOSE, key=lambda name: sent[name]) if any(sent[name] for name in MAY_CHOOSE) else "one_rank"
