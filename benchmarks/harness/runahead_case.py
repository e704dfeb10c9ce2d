"""The cases of `runahead.py`, measured by the ranks of one launch, and the searches for their partitions."""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

import megakv
from megakv.launcher.commands.search_partition import add_arguments
from megakv.launcher.passes import TimedPasses
from megakv.launcher.search import Desk
from megakv.runahead.partition import Partition, even, from_fractions
from megakv.runahead.table import ChainIdentity, LookupTable, load_table

from .models import random_ids
from .noise import QUIET, Switch
from .prefills import ChainPrefill, ContextParallelPrefill, Prefill, Prefills, cache_bytes, silence
from .profiles import measured_profile, shape_of
from .runahead_plan import APART, NOISES, NOISY, Group, profile_path
from .sampling import Method, Samples, Switched, measure
from .world import Agreement, World

CHAIN = {"context_parallel": {"prefill": "runahead"}, "runahead": {"partition": "even"}}
MAY_CHOOSE = ("runahead", "pass_kv", "pass_q")


def group_profile(arguments: argparse.Namespace, group: Group, world: World, model: PreTrainedModel) -> str | None:
    """The file of a group's hardware profile: given, kept by an earlier run, or measured now; None if there is none."""
    path = profile_path(group, arguments.profile, Path(arguments.parts))
    # Rank 0's view decides: another rank may see the file a moment later.
    if arguments.profile is None and arguments.profile_seconds and not world.gather(path.exists())[0]:
        profile = measured_profile(world, shape_of(model), arguments)
        if world.rank == 0:
            profile.save(path)
        world.barrier()
    return str(path) if arguments.profile is not None or path.exists() else None


def group_table(arguments: argparse.Namespace, group: Group, world: World) -> Path:
    """The group's own lookup table, which begins as the one given."""
    path = Path(arguments.parts) / "tables" / f"{group.name}.json"
    if world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        if arguments.table is not None and not path.exists():
            shutil.copyfile(group.filled(arguments.table), path)
    world.barrier()
    return path


class Searches:
    """Partitions searched as ``megakv search-partition`` does, and the table that they are written to."""

    def __init__(
        self, engine: megakv.MegaKVEngine, world: World, arguments: argparse.Namespace, table: Path, profile: str | None
    ):
        comm = self._comm = engine._comm
        self._shape = shape_of(engine.module)
        section = engine._config.megakv.runahead
        self._chain = ChainIdentity.of(comm, self._shape, kv=section.kv, chunk_tokens=section.chunk_tokens)
        self._passes = TimedPasses(engine, comm, arguments.search_repeats)
        self._world, self._path = world, table
        self._options = {"--profile": profile, "--step": arguments.search_step}
        self._options |= {"--patience": arguments.search_patience, "--repeats": arguments.search_repeats}

    def search(self, context: int) -> dict[str, Any] | None:
        """Find the partition of a length that the table does not have: what it came to, as JSON, on rank 0."""
        if self._world.gather(context in [entry.context for entry in self._entries()])[0]:
            return None
        result = failure = None
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
        return result and {**asdict(result), "trials": [trial.model_dump() for trial in result.trials]}

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


class CaseBench:
    """Measures one case after the other. Every rank must make the same calls; the model is whole on every rank."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        group: Group,
        world: World,
        model: PreTrainedModel,
        profile: str | None,
    ):
        table = group_table(arguments, group, world)
        self._arguments, self._group, self._world = arguments, group, world
        self._table, self._profile = table, profile
        self._prefills = Prefills(model, world)
        self.searches = Searches(self._prefills.engine("chain", CHAIN), world, arguments, table, profile)

    def close(self) -> None:
        self._prefills.close()

    def measure(self, context: int) -> list[dict[str, Any]]:
        """The rows of one length of prompt; all methods must compute the first one's logits."""
        arguments, world = self._arguments, self._world
        names = self._group.methods(arguments.methods, context, arguments.table_spacing)
        ids = random_ids(arguments.vocab, context, world.device)
        agreement = Agreement(world, arguments.dtype)
        # What auto may use of the table has changed since the last case.
        self._prefills.drop("auto")

        def inspect(name: str, output: Any) -> dict[str, Any]:
            kv_bytes = world.gather(cache_bytes(output.past_key_values))
            difference = None if name == "kvr_silent" else agreement.check(name, output.logits[0, -1])
            return {"kv_bytes": kv_bytes, "max_logit_difference": difference}

        methods: list[Method] = [self._method(name, ids) for name in names if name not in APART]
        if self._group.noise:
            switch = Switch(Path(arguments.switch), world.rank, world.size)
            methods = [
                Switched(
                    each, noise, partial(switch.next_run, each.name, noise), name=each.name if noise == QUIET else None
                )
                for each in methods
                for noise in (NOISES if each.name in NOISY else (QUIET,))
            ]
        least = min(arguments.repeats, arguments.least_repeats)
        limits = {"repeats": arguments.repeats, "least": least, "budget_s": arguments.cell_seconds}
        samples = measure(world, methods, inspect=inspect, **limits)
        if apart := [self._method(name, ids) for name in names if name in APART]:
            methods += apart
            samples += measure(world, apart, repeats=arguments.bound_repeats, inspect=inspect)
        return [self._row(context, method, sample) for method, sample in zip(methods, samples, strict=True)]

    def _method(self, name: str, ids: Tensor) -> Prefill:
        prefills, context = self._prefills, ids.shape[1]
        if name == "auto":
            parallel = {"prefill": "auto", "profile": self._profile}
            # What a user has who searched: the table, and the profile where the table says nothing.
            chain = {"table": str(self._table)} if self._table.exists() else {}
            engine = prefills.engine("auto", {"context_parallel": parallel, "runahead": chain})
            return ContextParallelPrefill(name, engine, ids)
        partition = self._partition(name, context)
        if partition is None:
            return prefills.make(name, ids)
        engine = prefills.engine("silent" if name == "kvr_silent" else "chain", CHAIN)
        if name == "kvr_silent":
            silence(engine)
        return ChainPrefill(name, engine, ids, partition)

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

    def _row(self, context: int, method: Method, sample: Samples) -> dict[str, Any]:
        inner: Any
        noise, inner = (method.state, method.method) if isinstance(method, Switched) else (QUIET, method)
        facts: dict[str, Any] = {"partition": None, "auto": None, "candidates_s": None}
        if isinstance(inner, ChainPrefill):
            facts["partition"] = list(inner.partition)
        elif inner.name == "auto":
            choice = inner.model._runtime.planner.choice
            facts |= {"auto": chosen(sample.bytes_sent), "candidates_s": dict(choice.predicted_s)}
            if facts["auto"] == "runahead":
                facts["partition"] = list(choice.partitions[0])
        group = self._group
        place = {"ranks": self._world.size, "kv_heads": group.kv_heads, "rate": group.rate, "context": context}
        return sample.to_row(**place, noise=noise, **facts) | {"method": inner.name}


def chosen(bytes_sent: Sequence[Mapping[str, int]]) -> str:
    """What `auto` chose, by what went over the wire most: the last layer's few queries go round with any ring."""
    sent = sum(map(Counter, bytes_sent), Counter())
    return max(MAY_CHOOSE, key=lambda name: sent[name]) if any(sent[name] for name in MAY_CHOOSE) else "one_rank"
