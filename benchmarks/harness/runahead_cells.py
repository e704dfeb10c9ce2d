"""The cells of `runahead.py`, measured by the ranks of one launch."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from megakv.runahead.partition import Partition, even

from .agreement import Agreement
from .chains import ChainPrefill, silence
from .models import random_ids
from .noise import ELSEWHERE, LINK, QUIET
from .noisy import Noisy
from .prefills import ContextParallelPrefill, MaskedPrefill, Prefill, Prefills, cache_bytes
from .runahead_plan import APART, NOISY, Group
from .sampling import Method, Samples, measure
from .searches import Searches
from .world import World

CHAIN = {"context_parallel": {"prefill": "runahead"}, "runahead": {"partition": "even"}}
MAY_CHOOSE = ("runahead", "pass_kv", "pass_q")


class CellBench:
    """Measures one cell after the other. Every rank must make the same calls."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        group: Group,
        world: World,
        model: PreTrainedModel,
        *,
        table: Path,
        profile: str | None,
    ):
        self._arguments = arguments
        self._group = group
        self._world = world
        self._prefills = Prefills(model, world)
        self._table = table
        self._profile = profile
        self.searches = Searches(
            self._prefills.engine("chain", CHAIN),
            world,
            table=table,
            profile=profile,
            step=arguments.search_step,
            patience=arguments.search_patience,
            repeats=arguments.search_repeats,
        )

    def close(self) -> None:
        """Let go of all engines."""
        self._prefills.close()

    def measure(self, context: int) -> list[dict[str, Any]]:
        """The rows of one length of prompt."""
        arguments, world = self._arguments, self._world
        names = self._group.methods(arguments.methods, context, arguments.table_spacing)
        ids = random_ids(arguments.vocab, context, world.device)
        agreement = Agreement(world, arguments.dtype)
        # What auto may use of the table has changed since the last cell.
        self._prefills.drop("auto")

        def inspect(name: str, output: Any) -> dict[str, Any]:
            facts: dict[str, Any] = {"kv_bytes": world.gather(cache_bytes(output.past_key_values))}
            facts["max_logit_difference"] = None
            if name != "kvr_silent":
                facts["max_logit_difference"] = agreement.check(name, output.logits[0, -1])
            return facts

        methods: list[Method] = [self._method(name, ids) for name in names if name not in APART]
        if self._group.noise:
            switch = Path(arguments.switch)
            methods = [
                Noisy(method, noise, switch, world)
                for method in methods
                for noise in ((QUIET, ELSEWHERE, LINK) if method.name in NOISY else (QUIET,))
            ]
        samples = measure(
            world,
            methods,
            repeats=arguments.repeats,
            least=min(arguments.repeats, arguments.least_repeats),
            budget_s=arguments.cell_seconds,
            inspect=inspect,
        )
        apart: list[Method] = [self._method(name, ids) for name in names if name in APART]
        if apart:
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
        if name == "single_masked":
            return MaskedPrefill(name, prefills.model, ids)
        partition = self._partition(name, context)
        if partition is None:
            return prefills.make(name, ids)
        if name == "kvr_silent":
            engine = prefills.engine("silent", CHAIN)
            silence(engine)
            return ChainPrefill(name, engine, ids, partition)
        return ChainPrefill(name, prefills.engine("chain", CHAIN), ids, partition)

    def _partition(self, name: str, context: int) -> Partition | None:
        size = self._world.size
        if name == "kvr_e":
            return even(context, size)
        if name == "one_rank":
            return (0,) * (size - 1) + (context,)
        if name in ("kvr_s", "kvr_silent"):
            return self.searches.partition(context)
        return self.searches.predicted(context, self._arguments.table_spacing) if name == "kvr_p" else None

    def _row(self, context: int, method: Method, sample: Samples) -> dict[str, Any]:
        noise = method.noise if isinstance(method, Noisy) else QUIET
        inner = method.method if isinstance(method, Noisy) else method
        facts: dict[str, Any] = {"partition": None, "auto": None, "candidates_s": None}
        if isinstance(inner, ChainPrefill):
            facts["partition"] = list(inner.partition)
        elif isinstance(inner, ContextParallelPrefill) and inner.name == "auto":
            facts["auto"] = chosen(sample.bytes_sent)
            choice = inner.model._runtime.planner.choice
            assert choice is not None
            facts["candidates_s"] = dict(choice.predicted_s)
            if facts["auto"] == "runahead":
                assert choice.partitions is not None
                facts["partition"] = list(choice.partitions[0])
        return sample.to_row(
            ranks=self._world.size,
            kv_heads=self._group.kv_heads,
            rate=self._group.rate,
            context=context,
            noise=noise,
            **facts,
        ) | {"method": inner.name}


def chosen(bytes_sent: Sequence[Mapping[str, int]]) -> str:
    """What `auto` chose, by what went over the wire most: the last layer's few queries go round with any ring."""
    sent: Counter[str] = Counter()
    for rank in bytes_sent:
        sent.update(rank)
    found = [name for name in MAY_CHOOSE if sent[name]]
    return max(found, key=lambda name: sent[name]) if found else "one_rank"
