"""Decode steps over ragged caches on real tensor-parallel ranks: the attention alone, and whole steps of an engine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import megakv
from megakv.cache.cache import ShardedCache
from megakv.cache.ragged import Span
from megakv.costmodel.head_times import HeadTimes
from megakv.costmodel.shape import ModelShape
from megakv.distributed.comm import Communicator
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import make_mesh

from ..methods import ContextParallel, Generation
from ..models import DTYPES, begin_whole, model_config, random_ids, without_stop
from ..predictions import measured_profile
from ..sampling import Agreement, Method, measure
from ..statistics import median
from ..world import World
from .division import (
    BY_TOKENS,
    CHOSEN,
    CONTIGUOUS,
    UNIFORM,
    Division,
    Piece,
    copies_of,
    divide_by,
    make_division,
    skewed_budgets,
)
from .kernels import HeadShape, RankLayer, TokenPool

Rows = list[dict[str, Any]]


class Room:
    """Memory for one method's cache at a time: the next one's takes its place."""

    guest: Any = None

    def take(self, guest: Any) -> None:
        """Let a method `build` its cache here, when the one before was told to `leave`; None: nobody has one."""
        if self.guest is not guest:
            if self.guest is not None:
                self.guest.leave()
            self.guest = guest
            if guest is not None:
                guest.build()


class RaggedDecode(Method):
    """A decode step's attention of all layers, several times; each ends in the all-reduce that ends it in a model."""

    def __init__(self, division: Division, pool: TokenPool, comm: Communicator, room: Room, *, batch: int, steps: int):
        super().__init__(division.name, lambda: room.take(self))
        self.compared = division.name != UNIFORM
        self._division, self._pool, self._comm = division, pool, comm
        self._batch, self._steps, self._shape = batch, steps, pool.shape
        self._layers: list[RankLayer] = []
        self._divided = [bool(division.divided(layer)) for layer in range(len(division.budgets))]
        self.busy: list[float] = []  # Of every run, the part of the time in which this rank computed
        self._computed = 0.0

    def build(self) -> None:
        rank, layers = self._comm.mesh.tp_rank, range(len(self._division.budgets))
        self._layers = [RankLayer(self._pool, self._division, layer, rank, self._batch) for layer in layers]

    def leave(self) -> None:
        self._layers.clear()

    @torch.inference_mode()
    def run(self) -> Tensor:
        """``[layers, B, K, G, D]`` outputs of the last step."""
        self._computed = 0.0
        start = time.perf_counter()
        for _ in range(self._steps):
            outputs = [self._layer(number) for number in range(len(self._layers))]
        self.busy.append(self._computed / (time.perf_counter() - start))
        return torch.stack(outputs)

    def duration(self, elapsed: float) -> float:
        return elapsed / self._steps

    def result(self, output: Any) -> Tensor:
        return output

    def _layer(self, number: int) -> Tensor:
        shape, layer = self._shape, self._layers[number]
        start = time.perf_counter()
        out, lse = layer.attend()
        whole = out.new_zeros(self._batch * shape.kv_heads, shape.group, shape.dim)
        self._computed += time.perf_counter() - start
        if self._divided[number]:
            layer.weigh(out, lse, self._comm.tp_all_reduce)
        whole[layer.index] = out
        return self._comm.tp_all_reduce(whole).view(self._batch, shape.kv_heads, shape.group, shape.dim)


class MappedGeneration(Generation):
    """Tokens of an engine whose heads are placed by a mapping, over a compressed cache; a sample is a step's time."""

    def __init__(
        self, division: Division, engine: megakv.MegaKVEngine, pool: TokenPool, ids: Tensor, tokens: int, *, room: Room
    ):
        held = ids.shape[1] - 1
        steps = lambda: room.take(self), lambda: self._cache.cut_back(held)
        super().__init__(division.name, ContextParallel(engine), ids, tokens, *steps)
        self.compared = division.name != UNIFORM
        self._division, self._pool, self._engine = division, pool, engine
        self.busy: list[float] = []  # Of every run, the part of the time in which this rank did not wait for others

    def build(self) -> None:
        batch, tokens = self._ids.shape[0], self._ids.shape[1] - 1
        runtime, rank = self._engine._runtime, self._engine.mesh.tp_rank
        assert runtime.compressor is not None
        cache: ShardedCache = self._engine.new_cache()
        begin_whole(cache, 1, batch, tokens)
        for layer, budgets in enumerate(self._division.budgets):
            pieces = {(piece.sequence, piece.head): piece for piece in self._division.pieces[layer][rank]}
            heads = runtime.compressor._heads.shard(layer, rank).kv_heads
            store: Any = cache.store(layer)
            for sequence in range(batch):
                own = [pieces.get((sequence, head), Piece(sequence, head, 0, 0)) for head in heads]
                # What a head keeps lies all over the prompt.
                rows = [np.arange(piece.start, piece.stop) * tokens // budgets[piece.head] for piece in own]
                store.add_span(sequence, Span(0, tokens, self._pool.body(layer, own, rows)))
        cache.commit(tokens, compressed=range(batch))
        self._cache = cache

    def leave(self) -> None:
        self._cache = None

    def run(self) -> Any:
        output = super().run()
        ledger = self._engine._comm.ledger
        self.busy.append(1 - ledger.waited_s() / ledger.now())
        return output


def make_engines(
    arguments: argparse.Namespace, world: World, divisions: Sequence[Division], *, positions: int
) -> dict[str, megakv.MegaKVEngine]:
    """By method: an engine over the same random Llama; methods whose heads lie in runs share theirs."""
    engines: dict[str, megakv.MegaKVEngine] = {}
    with TemporaryDirectory(prefix="megakv-benchmark-") as folder:
        # Every rank reads rank 0's files. Weights are drawn where they belong: no rank ever has the whole model.
        folder = world.gather(folder)[0]
        if world.rank == 0:
            model_config(arguments, positions=positions).save_pretrained(folder)
        for division in tqdm(divisions, desc="engines", unit="engine", disable=world.rank != 0):
            fairkv: dict[str, Any] = {"budget": 0.5}
            if division.mapping is not None:
                path = str(Path(folder) / f"{division.name}.json")
                fairkv |= {"copies": copies_of(division.name), "mapping": path}
                if world.rank == 0:
                    division.mapping.save(path)
            elif same := next((each for each in engines if each in (UNIFORM, CONTIGUOUS)), None):
                engines[division.name] = engines[same]
                continue
            world.barrier()
            config = {"dtype": arguments.dtype, "tensor_parallel": {"tp_size": world.size}}
            section = {"load": "random", "seed": arguments.seed, "fairkv": fairkv}
            engines[division.name] = megakv.init_inference(folder, {**config, "megakv": section})
            without_stop(engines[division.name].module)
        world.barrier()
    return engines


def measure_part(
    part: str, arguments: argparse.Namespace, world: World, divisions: Sequence[Division], *, budget_s: float
) -> Rows:
    """The rows of ``attention`` alone, or of engines' steps; all methods of the same budgets must agree."""
    longest = max(max(row) for division in divisions for row in division.budgets)
    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, DTYPES[arguments.dtype], world.device)
    pool, room = TokenPool(shape, longest, arguments.seed), Room()
    engines: dict[str, megakv.MegaKVEngine] = {}
    methods: list[Any]
    if part == "attention":
        comm = Communicator(make_mesh(cp_size=1, tp_size=world.size, timeout_s=arguments.timeout), Ledger())
        size = {"batch": arguments.batch, "steps": arguments.steps}
        methods = [RaggedDecode(division, pool, comm, room, **size) for division in divisions]
    else:
        engines = make_engines(arguments, world, divisions, positions=longest + arguments.tokens + 2)
        # A prompt is as long as the head that keeps most.
        ids = random_ids(arguments.vocab, longest + 1, world.device, arguments.batch)
        rest = pool, ids, arguments.tokens + 1
        methods = [MappedGeneration(each, engines[each.name], *rest, room=room) for each in divisions]
    limits = {"repeats": arguments.repeats, "budget_s": budget_s, "least": 3}
    samples = measure(world, methods, Agreement(world, arguments.dtype), **limits)
    room.take(None)
    place = {"part": part, "ranks": world.size, "batch": arguments.batch, "kept": arguments.kept}
    rows = []
    for sample, method, division in zip(samples, methods, divisions, strict=True):
        busy = world.gather(method.busy[1:])
        rates = {"busy": busy, "busy_rates": [median(rates).value for rates in busy]}
        rows.append(sample.to_row(**place, **rates, **division.facts()))
    for engine in {id(engine): engine for engine in engines.values()}.values():
        engine.destroy()
    return rows


def head_times(world: World, arguments: argparse.Namespace, **size: int) -> Any:
    """The cost model of steps of any batch, from a profile measured now. Every rank must call it."""
    model = ModelShape.from_config(model_config(arguments), dtype=DTYPES[arguments.dtype])
    profile = measured_profile(world, model, arguments, **size)
    shared = profile.sum_times(world.size, shared_memory=True) is not None
    return lambda batch: HeadTimes(profile, model, tp_size=world.size, batch=batch, shared_memory=shared)


def measure_parts(arguments: argparse.Namespace, world: World, parts: Sequence[str]) -> Rows:
    """The rows of some parts, with what is predicted of a profile measured before, if there is time to."""
    budgets = skewed_budgets(arguments.layers, arguments.kv_heads, arguments.kept, arguments.sigma, arguments.seed)
    place = {"ranks": world.size, "batch": arguments.batch}
    divisions = [make_division(name, budgets, **place) for name in arguments.methods]
    predicted: dict[tuple[str, str], float] = {}
    if arguments.profile_seconds and world.size > 1:
        times = head_times(world, arguments)(arguments.batch)
        outputs = arguments.batch * arguments.heads * arguments.head_dim * DTYPES[arguments.dtype].itemsize
        for division in divisions:
            entries = [division.shared_entries(layer) for layer in range(arguments.layers)]
            beside = sum(map(times.shared_s, entries)) + arguments.layers * times.summed_s(outputs)
            attention = sum(map(times.attention, division.works(arguments.batch))) + beside
            predicted["attention", division.name] = attention
            predicted["engine", division.name] = times.beside_s + sum(division.layer_seconds(times))
    rows = []
    for part in parts:
        for row in measure_part(part, arguments, world, divisions, budget_s=arguments.cell_seconds):
            if part == "attention":
                row["max_output_difference"] = row.pop("max_logit_difference")
            rows.append(row | {"predicted_s": predicted.get((part, row["method"]))})
    return rows


def measure_regimes(arguments: argparse.Namespace, world: World) -> Rows:
    """Steps at a model's true widths, by batch and kept tokens: a row for every regime and method.

    A head costs its weights, too, on each rank that holds it: what is worth it for many tokens is not for few. In every
    regime the mapping that the cost model chooses runs against contiguous heads, and two that only count tokens.
    """
    rows: Rows = []
    times_of = head_times(world, arguments, tp_size=world.size)
    for batch, kept in tqdm(arguments.regimes, desc="regimes", unit="regime", disable=world.rank != 0):
        place, times = {"ranks": world.size, "batch": batch}, times_of(batch)
        budgets = skewed_budgets(arguments.layers, arguments.kv_heads, kept, arguments.sigma, arguments.seed)
        names = [CONTIGUOUS, *(name for name in BY_TOKENS if world.size > 1), CHOSEN]
        found = [make_division(name, budgets, **place, times=times) for name in names]
        # Each rank could decide otherwise by a float's last bit.
        mappings = world.gather([each.mapping for each in found])[0]
        divisions = {
            name: divide_by(name, budgets, mapping, **place) for name, mapping in zip(names, mappings, strict=True)
        }
        own = argparse.Namespace(**{**vars(arguments), "batch": batch, "kept": kept})
        for row in measure_part("regimes", own, world, [*divisions.values()], budget_s=arguments.regime_seconds):
            division = divisions[row["method"]]
            same = division.mapping is not None and division.pieces == divisions[CONTIGUOUS].pieces
            row |= {"predicted_s": times.beside_s + sum(division.layer_seconds(times))}
            row |= {"left_alone": division.name == CHOSEN and same}
            row |= {"copies": sum(layer.copies for layer in division.mapping.layers) if division.mapping else 0}
            rows.append(row)
    return rows
