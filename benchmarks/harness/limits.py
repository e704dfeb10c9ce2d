"""The parts of `limits.py`: kernels against what the machine can do at all, and a token's time around them.

`attention` to a prompt's causal square against matrix products and PyTorch's kernel; `products` of one row with a
model's weights against reading memory and PyTorch's; `around`: a token of small layers, where nearly all is around the
computation, and of a small model on a long context, there also a short question's first one, against plain
transformers; `decoding`: two context-parallel ranks of one thread against one rank that has both threads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

import megakv
from megakv.attention.backends import attend_block, cpu_flash
from megakv.weights.products import rows_product

from .launch import Rows, Summary
from .models import DTYPES, drawn_model, random_ids, sharded_cache, single_caches, twin, without_stop
from .publish import show
from .spawned import Spawned
from .statistics import median, paired_ratio
from .timing import Call, by_turns, clocked
from .world import World, alone

SHAPES = (576, 576), (1536, 576), (576, 1536), (49152, 576), (4096, 4096)
"""Outputs and inputs: SmolLM2's queries, gate, down projection and output head, and a square of larger models."""
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


def measure_attention(arguments: argparse.Namespace) -> Rows:
    """A row for each case: seconds of each round, in which everything takes its turn."""
    rows = []
    cases = product(arguments.dtypes, arguments.head_dims, arguments.groups, arguments.keys)
    for dtype, head_dim, group, keys in tqdm([*cases], desc="attention", unit="case"):
        kv_heads = arguments.heads // group
        size = {"dtype": dtype, "head_dim": head_dim, "heads": kv_heads * group, "kv_heads": kv_heads, "keys": keys}
        found = by_turns(attention_calls(**size, matrix=arguments.matrix), arguments.repeats)
        # Pairs that are visible, and no others.
        flops = 4 * head_dim * kv_heads * group * keys * (keys + 1) // 2
        rate = {"flops": flops, "matrix_flops": 2 * arguments.matrix**3}
        rows.append({**size, "threads": arguments.threads, **rate, **found})
    return rows


def attention_calls(*, dtype: str, head_dim: int, heads: int, kv_heads: int, keys: int, matrix: int) -> dict[str, Call]:
    """By name: MegaKV's attention; PyTorch's kernel in the inputs' type and in float32; a matrix product."""
    kind, scale = DTYPES[dtype], head_dim**-0.5
    q = torch.randn(keys, heads, head_dim).to(kind).transpose(0, 1)
    k, v = (torch.randn(kv_heads, keys, head_dim).to(kind) for _ in range(2))
    a, b = (torch.randn(matrix, matrix).to(kind) for _ in range(2))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: dict[str, Call] = {
        "seconds": lambda: attend_block(q, k, v, scale, causal=True),
        "torch_seconds": lambda: flash(q[None], k[None], v[None], 0.0, True, scale=scale),
        "matrix_seconds": lambda: a @ b,
    }
    if dtype != "fp32":
        found["torch_float32_seconds"] = lambda: cpu_flash(q, k, v, scale, causal=True)
    return found


def report_attention(rows: Rows) -> tuple[Summary, list[Any]]:
    """Rates and shares, which are put into the rows; by type the lowest of all cases."""
    for row in rows:
        row["case"] = f"{row['heads']}:{row['kv_heads']} heads of {row['head_dim']}, {row['keys'] // 1024}K"
        for name, size in (("", "flops"), ("torch_", "flops"), ("matrix_", "matrix_flops")):
            row[f"{name}gflops"] = rate(row, size, f"{name}seconds")
        matrix = [row["flops"] / row["matrix_flops"] * each for each in row["matrix_seconds"]]
        row["share"] = paired_ratio(matrix, row["seconds"]).to_json()
        faster = min(("torch_seconds", "torch_float32_seconds"), key=lambda name: median(row.get(name, [1e9])).value)
        row["speedup"] = paired_ratio(row[faster], row["seconds"]).to_json()
    columns = "dtype case seconds:ms gflops torch_gflops matrix_gflops share speedup"
    show(rows, columns, "Causal attention; GFLOP/s of visible pairs, shares of the matrix rate of the type")
    return lowest(rows, "attention"), []


def measure_products(arguments: argparse.Namespace) -> Rows:
    """A row for each case: seconds of each round, in which everything takes its turn."""
    rows = []
    cases = [*product(sorted({1, arguments.threads}), arguments.dtypes, SHAPES)]
    read = torch.zeros(arguments.weights_mb << 17, dtype=torch.int64)
    for threads, dtype, (outputs, inputs) in tqdm(cases, desc="products", unit="case"):
        torch.set_num_threads(threads)
        kind = DTYPES[dtype]
        nbytes = outputs * inputs * kind.itemsize
        # So many that no cache holds them from one round to the next.
        weights = [torch.randn(outputs, inputs).to(kind) for _ in range(max(1, (arguments.weights_mb << 20) // nbytes))]
        found = by_turns(product_calls(torch.randn(1, 1, inputs).to(kind), weights, read), arguments.repeats)
        size = {"dtype": dtype, "outputs": outputs, "inputs": inputs, "threads": threads}
        rows.append({**size, "bytes": len(weights) * nbytes, "read_bytes": read.nbytes, **found})
    torch.set_num_threads(arguments.threads)
    return rows


def product_calls(x: torch.Tensor, weights: Sequence[torch.Tensor], read: torch.Tensor) -> dict[str, Call]:
    """By name: MegaKV's product, PyTorch's, and a sum over as many bytes."""

    @torch.no_grad()
    def own() -> object:
        return [rows_product(x, weight) for weight in weights]

    return {
        "seconds": own,
        "torch_seconds": lambda: [F.linear(x, weight) for weight in weights],
        "read_seconds": lambda: read.sum(),
    }


def report_products(rows: Rows) -> tuple[Summary, list[Any]]:
    """Rates, which are put into the rows; by type the lowest of all cases."""
    for row in rows:
        row["case"] = f"{row['outputs']}x{row['inputs']}, {row['threads']} thr."
        for name, size in (("", "bytes"), ("torch_", "bytes"), ("read_", "read_bytes")):
            row[f"{name}gb_per_s"] = rate(row, size, f"{name}seconds")
        read = [row["bytes"] / row["read_bytes"] * each for each in row["read_seconds"]]
        row["share"] = paired_ratio(read, row["seconds"]).to_json()
        row["speedup"] = paired_ratio(row["torch_seconds"], row["seconds"]).to_json()
    show(rows, "dtype case gb_per_s torch_gb_per_s read_gb_per_s share speedup", "Products of a row; GB/s of weights")
    return lowest(rows, "products"), []


def rate(row: dict[str, Any], size: str, seconds: str) -> float:
    """Billions a second."""
    return median([row[size] / each / 1e9 for each in row[seconds]]).value


def lowest(rows: Rows, part: str) -> Summary:
    kinds = dict.fromkeys(row["dtype"] for row in rows)
    return {
        f"{part}_{name}": {kind: min(row[name]["value"] for row in rows if row["dtype"] == kind) for kind in kinds}
        for name in ("share", "speedup")
    }


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
