"""Times of a token on one rank against plain transformers: of small layers, where nearly all is around the computation,
and of a small model on a long context, there also of a short question's first token; and of two context-parallel ranks
of one thread against one rank that has both threads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

import megakv

from ..launch import Rows, Summary
from ..models import DTYPES, drawn_model, random_ids, sharded_cache, single_caches, twin, without_stop
from ..publish import show
from ..spawned import Spawned
from ..statistics import median, paired_ratio
from ..timing import Call, by_turns, clocked
from ..world import World, alone

TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SMALL = LlamaConfig(
    num_hidden_layers=16, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
    vocab_size=256, max_position_embeddings=1024, **TOKENS,
)  # fmt: skip
SMOLLM2 = LlamaConfig(
    num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    intermediate_size=1536, vocab_size=49152, max_position_embeddings=65536, tie_word_embeddings=True, **TOKENS,
)  # fmt: skip
SMALL_LAYERS, LONG = CASES = "small layers", "SmolLM2's shape"
QUESTIONS = 12, 48  # Tokens of a question behind the context
PROMPT, STEPS, LONG_STEPS, RANK_STEPS = 64, 64, 8, 16
CPU = torch.device("cpu")


def step_s(generate: Callable[..., Any], ids: torch.Tensor, steps: int, **options: Any) -> float:
    """Median seconds of so many steps behind the first token; of no steps, until that is there."""
    _, clock = clocked(generate, ids, steps + 1, **options)
    return median(clock.seconds()).value if steps else clock.prompt_s


def measure_around(arguments: argparse.Namespace) -> Rows:
    """A row for each case: seconds per token, or to the first, of each round, in which everything takes its turn."""
    rows = []
    with alone(), torch.no_grad():
        for dtype, case in product(arguments.dtypes, CASES):
            threads = 1 if case == SMALL_LAYERS else arguments.threads
            torch.set_num_threads(threads)
            with ExitStack() as owned:
                cases = {case: small(dtype, owned)} if case == SMALL_LAYERS else long(dtype, arguments.context, owned)
                for name, calls in cases.items():
                    seconds = by_turns(calls, arguments.repeats, f"{name}, {dtype}")
                    rows.append({"dtype": dtype, "case": name, "threads": threads, **seconds})
    return rows


def small(dtype: str, owned: ExitStack) -> dict[str, Call]:
    """By name: MegaKV, and plain transformers with its own cache."""
    model, ids = without_stop(drawn_model(SMALL, DTYPES[dtype])), random_ids(SMALL.vocab_size, PROMPT, CPU)
    engine = owned.enter_context(megakv.init_inference(twin(model), {"dtype": dtype}))
    return {
        "seconds": lambda: step_s(engine.generate, ids, STEPS),
        "plain_seconds": lambda: step_s(model.generate, ids, STEPS, past_key_values=DynamicCache()),
    }


def long(dtype: str, context: int, owned: ExitStack) -> dict[str, dict[str, Call]]:
    """The same over a cache of random keys and values; transformers' copies all that it holds, or writes in place.

    By case: tokens, and questions' first ones.
    """
    model: Any = without_stop(drawn_model(SMOLLM2, DTYPES[dtype]))
    every = random_ids(SMOLLM2.vocab_size, context + max(QUESTIONS), CPU)
    engine = owned.enter_context(megakv.init_inference(twin(model), {"dtype": dtype}))
    shard = sharded_cache(model, World(0, 1, CPU), batch=1, tokens=context)
    in_place, copying = single_caches(model, batch=1, tokens=context, room=LONG_STEPS + 2 + max(QUESTIONS))

    def call(generate: Callable[..., Any], rewind: Callable[[], object], new: int, **options: Any) -> float:
        rewind()
        return step_s(generate, every[:, : context + new], LONG_STEPS if new == 1 else 0, **options)

    own = partial(engine.generate_into, shard), partial(shard.cut_back, context)
    plain = {
        name: partial(call, model.generate, cache.rewind, past_key_values=cache)
        for name, cache in (("plain_seconds", copying), ("in_place_seconds", in_place))
    }
    return {
        LONG if new == 1 else f"{LONG}, a question of {new}": {
            "seconds": partial(call, *own, new),
            **{name: partial(each, new) for name, each in plain.items()},
        }
        for new in (1, *QUESTIONS)
    }


def report_around(rows: Rows) -> tuple[Summary, list[Any]]:
    """Ratios, which are put into the rows."""
    for row in rows:
        row["ratio"] = paired_ratio(row["seconds"], row["plain_seconds"]).to_json()
    columns = "dtype case threads seconds:ms plain_seconds:ms in_place_seconds:ms ratio"
    show(rows, columns, "A token on one rank, and plain transformers' (in place: with a cache that is not copied)")
    return {"around_ratio": {f"{row['case']}, {row['dtype']}": row["ratio"]["value"] for row in rows}}, []


def measure_decoding(arguments: argparse.Namespace) -> Rows:
    """A row for each type and batch: seconds per token of each round, in which both worlds take their turn."""
    rows = []
    for dtype in arguments.dtypes:
        given = serve, dtype, arguments.context
        with Spawned(2, 1, *given) as two, Spawned(1, 2, *given) as one:
            for batch in arguments.batches:
                calls: Any = {"cp2_seconds": partial(two.ask, batch), "seconds": partial(one.ask, batch)}
                seconds = by_turns(calls, arguments.repeats, f"decoding, {dtype}, batch {batch}")
                rows.append({"dtype": dtype, "context": arguments.context, "batch": batch, **seconds})
    return rows


def serve(dtype: str, context: int, world: World, stack: ExitStack) -> Callable[[int], float]:
    """One rank: a step's seconds for as many sequences as it is told, over a cache of random keys and values."""
    model = without_stop(drawn_model(SMOLLM2, DTYPES[dtype]))
    section = {"context_parallel": {"size": world.size, "decode": "tensor"}}
    engine = stack.enter_context(megakv.init_inference(model, {"dtype": dtype, "megakv": section}))
    shards: dict[int, Any] = {}

    @torch.no_grad()
    def answer(batch: int) -> float:
        if batch not in shards:
            shards.clear()
            shards[batch] = sharded_cache(model, world, batch=batch, tokens=context)
        shards[batch].cut_back(context)
        ids = random_ids(SMOLLM2.vocab_size, context + 1, CPU, batch)
        return step_s(partial(engine.generate_into, shards[batch]), ids, RANK_STEPS)

    return answer


def report_decoding(rows: Rows) -> tuple[Summary, list[Any]]:
    """Ratios, which are put into the rows."""
    for row in rows:
        row["ratio"] = paired_ratio(row["cp2_seconds"], row["seconds"]).to_json()
    columns = "dtype context batch seconds:ms cp2_seconds:ms ratio"
    show(rows, columns, "A step of 1 rank x 2 threads, and CP 2 x 1 thread")
    steps = {f"{row['dtype']}, batch {row['batch']}": row["ratio"]["value"] for row in rows}
    single = {row["dtype"]: row["ratio"]["value"] for row in rows if row["batch"] == 1}
    return {"ttit_cp2_over_one": single, "step_cp2_over_one": steps}, []
