"""Decoding by engines whose heads are placed by a mapping, over compressed caches that need no prefill."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

import megakv
from megakv.cache import ShardedCache
from megakv.fairkv.store import RaggedStore
from megakv.sharding import balanced, new_tokens

from .agreement import Agreement
from .fairkv_report import load_facts
from .generations import ContextParallelGeneration, without_stop
from .head_division import CONTIGUOUS, UNIFORM, Budgets, Division, make_mapping
from .models import random_ids, random_llama, twin
from .sampling import measure
from .statistics import median
from .world import World


class MappedGeneration(ContextParallelGeneration):
    """Tokens of an engine over a compressed cache.

    Attributes
    ----------
    busy : list of float
        Of every run, the part of the time in which this rank did not wait for others.
    """

    def __init__(self, name: str, engine: megakv.MegaKVEngine, ids: Tensor, tokens: int, *, cache: ShardedCache):
        super().__init__(name, engine, ids, tokens, cache=cache)
        self.busy: list[float] = []

    def run(self) -> Any:
        output = super().run()
        ledger = self._engine._comm.ledger
        waited = sum(tally.seconds_exposed for tally in ledger.by_operation().values())
        self.busy.append(1 - waited / ledger.now())
        return output


def fill_cache(engine: megakv.MegaKVEngine, budgets: Budgets, batch: int, tokens: int) -> ShardedCache:
    """A cache as compression would leave it after prompts of `tokens` tokens: random, the same for every placement.

    Parameters
    ----------
    engine : MegaKVEngine
        On tensor-parallel ranks alone, with a ``megakv.fairkv.budget``.
    budgets : list
        ``[layer][KV head]`` kept tokens of every sequence.
    batch, tokens : int
    """
    runtime, config = engine._runtime, engine.module.config
    assert runtime.compressor is not None
    cache = engine._new_cache()
    positions = np.broadcast_to(np.arange(tokens), (batch, tokens))
    cache.begin(balanced(new_tokens(np.ones((batch, tokens), dtype=bool), positions, 0), 1), batch)
    for layer, row in enumerate(budgets):
        heads = runtime.compressor._heads.shard(layer, engine.mesh.tp_rank).kv_heads
        store = cache.store(layer)
        assert isinstance(store, RaggedStore)
        store.begin(complete=True)
        keep = [torch.stack([_kept(layer, sequence, h, row[h], tokens) for h in heads]) for sequence in range(batch)]
        if runtime.replicas is not None:
            keep = runtime.replicas.split(layer, keep)
        for sequence, mask in enumerate(keep):
            pairs = [_random(layer, sequence, head, tokens, 2 * config.head_dim) for head in heads]
            keys, values = torch.stack(pairs).to(engine.mesh.device, engine.module.dtype).chunk(2, -1)
            store.append(sequence, keys, values)
            store.compress(sequence, mask.to(engine.mesh.device))
        store.release()
    cache.commit(tokens, compressed=True)
    return cache


def _generator(*name: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(name) % (1 << 62))


def _kept(layer: int, sequence: int, head: int, budget: int, tokens: int) -> Tensor:
    """``[S]`` which tokens a head keeps."""
    order = torch.randperm(tokens, generator=_generator(1, layer, sequence, head))
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[order[:budget]] = True
    return mask


def _random(layer: int, sequence: int, head: int, tokens: int, size: int) -> Tensor:
    """``[S, size]`` keys and values of a head, side by side."""
    return torch.randn(tokens, size, generator=_generator(2, layer, sequence, head))


def measure_engines(arguments: argparse.Namespace, world: World, divisions: Sequence[Division]) -> list[dict[str, Any]]:
    """The rows of whole decode steps.

    Raises
    ------
    MegaKVError
        If a placement computes other logits than the first of the same budgets.
    """
    tokens = 1 + max(max(row) for division in divisions for row in division.budgets)
    steps = arguments.tokens + 1
    model = without_stop(random_llama(arguments, positions=tokens + steps + 1, device=world.device))
    ids = random_ids(arguments.vocab, tokens + 1, world.device, arguments.batch)
    methods, engines = [], {}
    with TemporaryDirectory(prefix="megakv-benchmark-") as folder:
        # Every rank reads rank 0's files.
        folder = world.gather(folder)[0]
        for division in divisions:
            mapping = make_mapping(division.name, division.budgets, ranks=world.size, batch=arguments.batch)
            key = CONTIGUOUS if mapping is None else division.name
            if key not in engines:
                fairkv: dict[str, Any] = {"budget": 0.5}
                if mapping is not None:
                    fairkv["mapping"] = str(Path(folder) / f"{key}.json")
                    if world.rank == 0:
                        mapping.save(fairkv["mapping"])
                    world.barrier()
                config = {"tensor_parallel": {"tp_size": world.size}, "megakv": {"fairkv": fairkv}}
                engines[key] = megakv.init_inference(twin(model), config)
            cache = fill_cache(engines[key], division.budgets, arguments.batch, tokens)
            methods.append(MappedGeneration(division.name, engines[key], ids, steps, cache=cache))
        world.barrier()
    del model
    agreement = Agreement(world, arguments.dtype)

    def inspect(name: str, output: Any) -> dict[str, Any]:
        return {} if name == UNIFORM else {"max_logit_difference": agreement.check(name, output.logits[0])}

    samples = measure(
        world, methods, repeats=arguments.repeats, inspect=inspect, budget_s=arguments.cell_seconds, least=3
    )
    rows = []
    for sample, method, division in zip(samples, methods, divisions, strict=True):
        busy = world.gather(method.busy[1:])
        rows.append(
            sample.to_row(
                part="engine",
                ranks=arguments.ranks,
                batch=arguments.batch,
                kept=arguments.kept,
                tokens_per_sample=arguments.tokens,
                busy=busy,
                busy_rates=[median(rates).value for rates in busy],
                **load_facts(division),
            )
        )
    for engine in engines.values():
        engine.destroy()
    return rows
