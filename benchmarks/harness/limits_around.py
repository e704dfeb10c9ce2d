"""Times of a token on one rank against plain transformers: of small layers, where nearly all is around the computation,
and of a small model on a long context; there also of a short question's first token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

import megakv

from .charts import groups
from .launch import Rows, Summary
from .models import DTYPES, drawn_model, random_ids, sharded_cache, single_caches, twin, without_stop
from .publish import show
from .statistics import median, paired_ratio
from .world import World, alone

Generate = Callable[[int], list[float]]
"""Seconds of so many steps behind the first token."""
TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SMALL = LlamaConfig(
    num_hidden_layers=16, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
    vocab_size=256, max_position_embeddings=1024, **TOKENS,
)  # fmt: skip
SMOLLM2 = LlamaConfig(
    num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    intermediate_size=1536, vocab_size=49152, max_position_embeddings=65536, tie_word_embeddings=True, **TOKENS,
)  # fmt: skip
CASES = SMALL_LAYERS, _ = "small layers", "SmolLM2's shape"
QUESTIONS = 12, 48
"""Tokens of a question behind the context."""
PROMPT, STEPS = 64, 64
LONG_STEPS = 8


class Stopwatch(BaseStreamer):
    """When each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def steps(self) -> list[float]:
        """Seconds from each token to the next; the first of `times` is the prompt's."""
        return [later - earlier for earlier, later in pairwise(self.times[1:])]

    def first(self) -> list[float]:
        """Seconds to the first token."""
        return [self.times[1] - self.times[0]]


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each case: seconds per token, or to the first, of each round, in which everything takes its turn."""
    rows = []
    with alone(), torch.no_grad():
        for dtype, case in product(arguments.dtypes, CASES):
            threads = 1 if case == SMALL_LAYERS else arguments.threads
            torch.set_num_threads(threads)
            with ExitStack() as owned:
                found = [(case, small(dtype, owned))] if case == SMALL_LAYERS else long(dtype, arguments.context, owned)
                for name, generators in found:
                    seconds = rounds(generators, STEPS if case == SMALL_LAYERS else LONG_STEPS, arguments.repeats, name)
                    rows.append({"dtype": dtype, "case": name, "threads": threads, **seconds})
    return rows


def rounds(generators: dict[str, Generate], steps: int, repeats: int, what: str) -> dict[str, list[float]]:
    """Of every round but the first, each one's median."""
    seconds: dict[str, list[float]] = {name: [] for name in generators}
    for index in tqdm(range(repeats + 1), desc=what):
        for name, generate in generators.items():
            taken = median(generate(steps)).value
            if index:
                seconds[name].append(taken)
    return seconds


def small(dtype: str, owned: ExitStack) -> dict[str, Generate]:
    """By name: MegaKV, and plain transformers with its own cache."""
    model = without_stop(drawn_model(SMALL, DTYPES[dtype]))
    ids = random_ids(SMALL.vocab_size, PROMPT, torch.device("cpu"))
    engine = owned.enter_context(megakv.init_inference(twin(model), {"dtype": dtype}))
    return {
        "seconds": lambda steps: timed(engine.generate, ids, steps),
        "plain_seconds": lambda steps: timed(model.generate, ids, steps, past_key_values=DynamicCache()),
    }


def long(dtype: str, context: int, owned: ExitStack) -> list[tuple[str, dict[str, Generate]]]:
    """The same over a cache of random keys and values; transformers' copies all that it holds, or writes in place.

    By case: tokens, and questions' first ones.
    """
    model: PreTrainedModel = without_stop(drawn_model(SMOLLM2, DTYPES[dtype]))
    every = random_ids(SMOLLM2.vocab_size, context + max(QUESTIONS), torch.device("cpu"))
    engine = owned.enter_context(megakv.init_inference(twin(model), {"dtype": dtype}))
    shard = sharded_cache(model, World(0, 1, torch.device("cpu")), batch=1, tokens=context)
    in_place, copying = single_caches(model, batch=1, tokens=context, room=LONG_STEPS + 2 + max(QUESTIONS))

    def own(new: int) -> Generate:
        def generate(steps: int) -> list[float]:
            shard.cut_back(context)
            return taken(lambda ids, **options: engine.generate_into(shard, ids, **options), new, steps)

        return generate

    def plain(cache: Any, new: int) -> Generate:
        def generate(steps: int) -> list[float]:
            cache.rewind()
            return taken(model.generate, new, steps, past_key_values=cache)

        return generate

    def taken(generate: Callable[..., Any], new: int, steps: int, **options: Any) -> list[float]:
        watch = watched(generate, every[:, : context + new], steps if new == 1 else 0, **options)
        return watch.steps() if new == 1 else watch.first()

    return [
        (
            CASES[1] if new == 1 else f"{CASES[1]}, a question of {new}",
            {"seconds": own(new), "plain_seconds": plain(copying, new), "in_place_seconds": plain(in_place, new)},
        )
        for new in (1, *QUESTIONS)
    ]


def timed(generate: Callable[..., Any], ids: Tensor, steps: int, **options: Any) -> list[float]:
    return watched(generate, ids, steps, **options).steps()


def watched(generate: Callable[..., Any], ids: Tensor, steps: int, **options: Any) -> Stopwatch:
    """So many steps behind the first token."""
    watch, mask = Stopwatch(), torch.ones_like(ids)
    generate(ids, attention_mask=mask, max_new_tokens=steps + 1, do_sample=False, streamer=watch, **options)
    return watch


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Milliseconds per token and their ratios, which are put into the rows; and the chart."""
    for row in rows:
        row["ratio"] = paired_ratio(row["seconds"], row["plain_seconds"]).to_json()
    columns = "dtype case threads seconds:ms plain_seconds:ms in_place_seconds:ms ratio"
    show(rows, columns, "A token on one rank, and plain transformers' (in place: with a cache that is not copied)")
    summary = {"around_ratio": {f"{row['case']}, {row['dtype']}": row["ratio"]["value"] for row in rows}}
    drawn = [
        {"case": f"{row['case']}\n{row['dtype']}", "what": what, "ms": [1e3 * each for each in row[name]]}
        for row in rows
        for what, name in (("MegaKV", "seconds"), ("transformers", "plain_seconds"))
    ]
    words = {
        "title": "A token on one rank",
        "subtitle": "16 small layers, or a long context, also a question's first token; median, 95% interval",
        "y_label": "ms, less is better",
    }
    return summary, [groups("around", drawn, "case", "what", "ms", **words)]
