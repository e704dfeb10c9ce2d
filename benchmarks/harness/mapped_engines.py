"""Decoding by engines whose heads are placed by a mapping, over compressed caches that need no prefill."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

import megakv
from megakv.cache.cache import ShardedCache
from megakv.distributed.sharding import balanced, new_tokens
from megakv.fairkv.store import RaggedStore, Span

from .agreement import Agreement
from .fairkv_report import load_facts
from .generations import ContextParallelGeneration, without_stop
from .head_division import CONTIGUOUS, UNIFORM, Division, Piece, make_mapping
from .models import DTYPES, llama_config, random_ids
from .ragged_heads import HeadShape, TokenPool, ragged_body
from .room import Room
from .sampling import measure
from .statistics import median
from .world import World


class MappedGeneration(ContextParallelGeneration):
    """Tokens of an engine over a compressed cache; a sample is the time of a step."""

    def __init__(
        self, division: Division, engine: megakv.MegaKVEngine, pool: TokenPool, ids: Tensor, tokens: int, *, room: Room
    ):
        super().__init__(division.name, engine, ids, tokens)
        self._cached = True
        self._division, self._pool, self._room = division, pool, room
        self.busy: list[float] = []

    def prepare(self) -> None:
        self._room.take(self)
        super().prepare()

    def build(self) -> None:
        """Fill the cache."""
        batch, length = self._ids.shape
        self._cache = fill_cache(self._engine, self._division, self._pool, batch, length - 1)

    def leave(self) -> None:
        """Free the cache."""
        self._cache = None

    def run(self) -> Any:
        output = super().run()
        ledger = self._engine._comm.ledger
        self.busy.append(1 - ledger.waited_s() / ledger.now())
        return output


def fill_cache(
    engine: megakv.MegaKVEngine, division: Division, pool: TokenPool, batch: int, tokens: int
) -> ShardedCache:
    """A cache as compression would leave it after prompts of `tokens` tokens: the same heads for every placement."""
    runtime, rank = engine._runtime, engine.mesh.tp_rank
    assert runtime.compressor is not None
    cache = engine._new_cache()
    positions = np.broadcast_to(np.arange(tokens), (batch, tokens))
    cache.begin(balanced(new_tokens(np.ones((batch, tokens), dtype=bool), positions, 0), 1), batch)
    for layer, budgets in enumerate(division.budgets):
        pieces = {(piece.sequence, piece.head): piece for piece in division.pieces[layer][rank]}
        heads = runtime.compressor._heads.shard(layer, rank).kv_heads
        store = cache.store(layer)
        assert isinstance(store, RaggedStore)
        for sequence in range(batch):
            own = [pieces.get((sequence, head), Piece(sequence, head, 0, 0)) for head in heads]
            # What a head keeps lies all over the prompt.
            rows = [np.arange(piece.start, piece.stop) * tokens // budgets[piece.head] for piece in own]
            store.add_span(sequence, Span(0, tokens, ragged_body(pool, layer, own, rows)))
    cache.commit(tokens, compressed=range(batch))
    return cache


def make_engines(
    arguments: argparse.Namespace, world: World, divisions: Sequence[Division], *, positions: int
) -> dict[str, megakv.MegaKVEngine]:
    """By method: an engine over the same random Llama; methods whose heads lie in runs share theirs."""
    engines: dict[str, megakv.MegaKVEngine] = {}
    found = {}
    with TemporaryDirectory(prefix="megakv-benchmark-") as folder:
        # Every rank reads rank 0's files. Weights are drawn where they belong: no rank ever has the whole model.
        folder = world.gather(folder)[0]
        if world.rank == 0:
            llama_config(arguments, positions=positions).save_pretrained(folder)
        for division in tqdm(divisions, desc="engines", unit="engine", disable=world.rank != 0):
            mapping = make_mapping(division.name, division.budgets, ranks=world.size, batch=arguments.batch)
            key = CONTIGUOUS if mapping is None else division.name
            if key not in engines:
                fairkv: dict[str, Any] = {"budget": 0.5}
                if mapping is not None:
                    fairkv["mapping"] = str(Path(folder) / f"{key}.json")
                    if world.rank == 0:
                        mapping.save(fairkv["mapping"])
                world.barrier()
                config = {"dtype": arguments.dtype, "tensor_parallel": {"tp_size": world.size}}
                engines[key] = megakv.init_inference(
                    folder, {**config, "megakv": {"load": "random", "seed": arguments.seed, "fairkv": fairkv}}
                )
                without_stop(engines[key].module)
            found[division.name] = engines[key]
        world.barrier()
    return found


def measure_engines(arguments: argparse.Namespace, world: World, divisions: Sequence[Division]) -> list[dict[str, Any]]:
    """The rows of whole decode steps."""
    longest = max(max(row) for division in divisions for row in division.budgets)
    steps = arguments.tokens + 1
    engines = make_engines(arguments, world, divisions, positions=longest + steps + 1)
    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, DTYPES[arguments.dtype], world.device)
    pool, room = TokenPool(shape, longest, arguments.seed), Room()
    ids = random_ids(arguments.vocab, longest + 1, world.device, arguments.batch)
    methods = [
        MappedGeneration(division, engines[division.name], pool, ids, steps, room=room) for division in divisions
    ]
    agreement = Agreement(world, arguments.dtype)

    def inspect(name: str, output: Any) -> dict[str, Any]:
        return {} if name == UNIFORM else {"max_logit_difference": agreement.check(name, output.logits[0])}

    samples = measure(
        world, methods, repeats=arguments.repeats, inspect=inspect, budget_s=arguments.cell_seconds, least=3
    )
    room.clear()
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
    for engine in {id(engine): engine for engine in engines.values()}.values():
        engine.destroy()
    return rows
