"""The cases of `runahead.py`, measured by the ranks of one launch, and the searches for their partitions."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import megakv
from megakv.attention.chain import ChainLink, ChainPlan
from megakv.attention.method import AttentionCall
from megakv.attention.partial import PackedAttention
from megakv.attention.ring import KVFormat
from megakv.attention.runahead import Runahead
from megakv.base.partition import Partition, even, from_fractions
from megakv.launcher.search import search
from megakv.runahead.table import load_table

from ..methods import ContextParallel, Peers, Prefill
from ..models import random_ids
from ..noise import QUIET, Switch
from ..profiles import measured_profile, shape_of
from ..sampling import Agreement, Samples, measure
from ..world import World
from .plan import APART, NOISES, NOISY, Group, profile_path

MAY_CHOOSE = ("runahead", "pass_kv", "pass_q")


def group_profile(arguments: argparse.Namespace, group: Group, world: World, model: PreTrainedModel) -> str | None:
    """The file of a group's hardware profile: kept by an earlier run, or measured now; None if there is none."""
    path = profile_path(group, Path(arguments.parts))
    # Rank 0's view decides: another rank may see the file a moment later.
    if arguments.profile_seconds and not world.gather(path.exists())[0]:
        profile = measured_profile(world, shape_of(model), arguments)
        if world.rank == 0:
            profile.save(path)
        world.barrier()
    return str(path) if path.exists() else None


class Searches:
    """Partitions searched as ``megakv search-partition`` does, and the table that they are written to."""

    def __init__(
        self, engine: megakv.MegaKVEngine, world: World, arguments: argparse.Namespace, table: Path, profile: str | None
    ):
        self._engine, self._world, self._path = engine, world, table
        self._options = {"step": arguments.search_step}
        self._options |= {"repeats": arguments.search_repeats, "profile": profile, "full_grid": False}

    def search(self, context: int) -> dict[str, Any] | None:
        """Find the partition of a length that the table does not have: what it came to, as JSON, on rank 0."""
        if self._world.gather(any(entry.context == context for entry in self._table().entries))[0]:
            return None
        picture = str(self._path.with_name(f"{self._path.stem}-{context}.png"))
        words = {"model": "model", "contexts": [str(context)], "table": str(self._path), "png": picture}
        found = search(self._engine, self._engine._config, argparse.Namespace(**words, **self._options))
        if found is None:
            return None
        return {**asdict(found[0]), "trials": [trial.model_dump() for trial in found[0].trials]}

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

    def __init__(self, arguments: argparse.Namespace, group: Group, world: World, peers: Peers):
        self._arguments, self._group, self._world, self._peers = arguments, group, world, peers
        self._profile = group_profile(arguments, group, world, peers.model)
        self._table = Path(arguments.parts) / "tables" / f"{group.name}.json"
        self._table.parent.mkdir(parents=True, exist_ok=True)
        self.searches = Searches(chain_engine(peers, "chain"), world, arguments, self._table, self._profile)

    def measure(self, context: int) -> list[dict[str, Any]]:
        """The rows of one length of prompt; all methods must compute the first one's logits."""
        arguments, world, group = self._arguments, self._world, self._group
        names = group.methods(arguments.methods, context, arguments.table_spacing)
        ids = random_ids(arguments.vocab, context, world.device)
        agreement = Agreement(world, arguments.dtype)
        # What auto may use of the table has changed since the last case.
        self._peers.drop("auto")
        runs = [
            (name, noise)
            for name in names
            if name not in APART
            for noise in (NOISES if group.noise and name in NOISY else (QUIET,))
        ]
        switch = Switch(Path(arguments.switch), world.rank, world.size) if group.noise else None
        switched = [[partial(switch.next_run, name, noise)] if switch else [] for name, noise in runs]
        methods = [self._method(name, ids, *steps) for (name, _), steps in zip(runs, switched, strict=True)]
        least = min(arguments.repeats, arguments.least_repeats)
        limits = {"repeats": arguments.repeats, "least": least, "budget_s": arguments.cell_seconds}
        samples = measure(world, methods, agreement, **limits)
        if apart := [name for name in names if name in APART]:
            runs += [(name, QUIET) for name in apart]
            rest = [self._method(name, ids) for name in apart]
            samples += measure(world, rest, agreement, repeats=arguments.bound_repeats)
        place = {"ranks": world.size, "kv_heads": group.kv_heads, "rate": group.rate, "context": context}
        return [
            sample.to_row(**place, noise=noise, **self._facts(name, context, sample))
            for (name, noise), sample in zip(runs, samples, strict=True)
        ]

    def _method(self, name: str, ids: Tensor, *switch: Callable[[], object]) -> Prefill:
        if name == "auto":
            # What a user has who searched: the table, and the profile where the table says nothing.
            chain = {"table": str(self._table)} if self._table.exists() else {}
            engine = self._peers.engine("auto", {"prefill": "auto", "profile": self._profile}, runahead=chain)
            return Prefill(name, ContextParallel(engine), ids, *switch)
        partition = self._partition(name, ids.shape[1])
        if partition is None:
            return self._peers.prefill(name, ids, *switch)
        engine = chain_engine(self._peers, "silent" if name == "kvr_silent" else "chain")
        method = Prefill(name, ContextParallel(engine), ids, partial(engine.partitions.use, partition), *switch)
        if name == "kvr_silent":
            silence(engine)
            method.compared = False
        return method

    def _partition(self, name: str, context: int) -> Partition | None:
        size = self._world.size
        match name:
            case "kvr_e":
                return even(context, size)
            case "one_rank":
                return (0,) * (size - 1) + (context,)
            case "kvr_s" | "kvr_silent":
                return self.searches.partition(context)
            case "kvr_p":
                return self.searches.predicted(context, self._arguments.table_spacing)
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


def chain_engine(peers: Peers, name: str) -> megakv.MegaKVEngine:
    return peers.engine(name, {"prefill": "runahead"}, runahead={"partition": "even"})


def chosen(bytes_sent: Sequence[Mapping[str, int]]) -> str:
    """Tell what `auto` chose by what went over the wire most: the last layer's few queries go round with any ring."""
    sent = sum(map(Counter, bytes_sent), Counter())
    return max(MAY_CHOOSE, key=lambda name: sent[name]) if any(sent[name] for name in MAY_CHOOSE) else "one_rank"


# The chain without communication, a bound for it: every rank does its work at once, on made-up prefixes


class SilentLink(ChainLink):
    """A place in the chain where nothing is sent, and random numbers stand for what would be received."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: dict[tuple[int, int], Tensor] = {}

    def start_pass(self, plan: ChainPlan) -> None:
        pass

    def start_layer(self, call: AttentionCall, sizes: Sequence[int], following: Sequence[tuple[int, int]]) -> None:
        pass

    def send_own(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> None:
        pass

    def arrivals(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> Iterator[tuple[int, Tensor]]:
        for index in plan.incoming:
            key = index, messages.nbytes(index)
            if key not in self._messages:
                numbers = torch.randn(key[1] // call.q_HLD.element_size())
                self._messages[key] = numbers.to(call.q_HLD).view(torch.uint8)
            yield index, self._messages[key]


class SilentQueries:
    """The visits of the last layer's queries without their ways: every rank attends for random ones at once."""

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        heads, _, dim = call.q_HLD.shape
        found: dict[int, tuple[Tensor, Tensor]] = {}
        with call.comm.ledger.compute("attention", call.layer):
            for rank, tokens in enumerate(call.queries):
                own = rank == call.rank
                queries = call.q_HLD if own else torch.randn(heads, len(tokens), dim).to(call.q_HLD)
                attention = PackedAttention(queries, tokens, call.scoring, call.value_dim)
                for part in call.parts:
                    attention.add(part)
                found[rank] = attention.result()
        return found[call.rank]


def silence(engine: megakv.MegaKVEngine) -> None:
    """Let an engine's chain send nothing from now on: what it computes is worth nothing but its time."""
    method = engine._runtime.methods["runahead"]
    assert isinstance(method, Runahead)
    method._link = SilentLink()
    engine._runtime.methods["pass_q"] = SilentQueries()
