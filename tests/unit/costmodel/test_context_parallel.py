"""Closed forms against numbers worked out from the paper, and bytes against the messages that the methods make."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megakv.attention.ring import KVFormat, QueryFormat
from megakv.costmodel.context_parallel import (
    Workload,
    attention_flops,
    chain_tokens,
    context_hiding_queries,
    cp_bytes_per_block,
    flops_per_pair,
    miss_rate_of_equal_bytes,
    miss_rate_with_all_to_all,
    new_tokens_hiding_kv,
    sent_bytes,
    tp_bytes_per_block,
    tsp_tokens,
)
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import TokenTable
from megakv.planner.measure.trial import tokens
from tests.unit.costmodel.test_shape import llama_405b

# Llama-3 405B, N_H = 128, N_KV = 8, in 16 bits.
LLAMA_405B = AttentionShape(128, 8, 128, 128, 2)
# Of a host of eight H100: 540 TF/s each are reached; the bandwidth at which the text's tipping point of 3.25% follows.
H100 = {"size": 4, "flops": 8 * 540e12, "bandwidth": 8 * 32.5e9}


def test_table_3() -> None:
    model_dim = 16384
    assert 3200 * LLAMA_405B.query_row_bytes == 3200 * model_dim * 2
    assert 128_000 * LLAMA_405B.kv_row_bytes == 2 * 128_000 * model_dim * 2 / 16
    assert attention_flops(LLAMA_405B, 3200, 124_800) == 4 * 3200 * model_dim * 128_000
    assert attention_flops(LLAMA_405B, 1_000_000, 0, causal=True) == 4e12 * model_dim / 2
    assert attention_flops(LLAMA_405B, 10, 90, causal=True) == 4 * model_dim * (900 + 50)


def test_table_2() -> None:
    model = ModelShape.from_config(llama_405b(), dtype=torch.bfloat16)
    assert tp_bytes_per_block(model, 1000) == 2 * 1000 * 16384 * 2
    assert cp_bytes_per_block(model, 1000) == 2 * 1000 * 1024 * 2
    assert tp_bytes_per_block(model, 7) / cp_bytes_per_block(model, 7) == 128 / 8


def test_equation_1() -> None:
    assert miss_rate_of_equal_bytes(LLAMA_405B) == 0.125
    assert LLAMA_405B.query_row_bytes == LLAMA_405B.kv_row_bytes / 0.125


def test_equations_2_and_3() -> None:
    threshold = new_tokens_hiding_kv(LLAMA_405B, **H100)
    assert threshold == pytest.approx(4 * (540e12 * 8 * 2) / (2 * 128 * 32.5e9))
    assert threshold / 128_000 == pytest.approx(0.0325, abs=2e-4)
    assert context_hiding_queries(LLAMA_405B, **H100) == pytest.approx(4 * 2 * 540e12 / (4 * 32.5e9))
    # At the threshold the exchange takes as long as a rank's attention.
    exchange_s = 128_000 * LLAMA_405B.kv_row_bytes / H100["bandwidth"]
    assert attention_flops(LLAMA_405B, 1, 127_999) * threshold / (4 * H100["flops"]) == pytest.approx(exchange_s)


def test_equation_5() -> None:
    expected = 0.125 - 4 * 3200 * 32.5e9 / (4 * 540e12 * 2)
    assert miss_rate_with_all_to_all(LLAMA_405B, 3200, **H100) == pytest.approx(expected)
    assert expected == pytest.approx(0.0287, abs=1e-4)


def test_group_of_ranks_that_share_heads_has_the_same_thresholds() -> None:
    """With eight times the heads and eight times the links, every rank of eight says the same."""
    one = AttentionShape(16, 1, 128, 128, 2)
    alone = {"size": 4, "flops": 540e12, "bandwidth": 32.5e9}
    assert new_tokens_hiding_kv(one, **alone) == pytest.approx(new_tokens_hiding_kv(LLAMA_405B, **H100))
    ours, theirs = miss_rate_with_all_to_all(one, 3200, **alone), miss_rate_with_all_to_all(LLAMA_405B, 3200, **H100)
    assert ours == pytest.approx(theirs)


def test_different_value_dimension() -> None:
    latent = AttentionShape(16, 16, 192, 128, 2)
    assert flops_per_pair(latent) == 2 * 16 * (192 + 128)
    assert miss_rate_of_equal_bytes(latent) == (192 + 128) / 192


def message(shape: AttentionShape, layout: Any, rank: int) -> Any:
    """As much of a call as message formats look at."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[shape.element_bytes]
    return SimpleNamespace(
        queries=layout.tokens,
        kv_heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        v_KLD=torch.empty(shape.kv_heads, 0, 0 if shape.row_dim else shape.value_dim, dtype=dtype),
        q_HLD=torch.empty(shape.heads, len(layout.tokens[rank]), shape.key_dim, dtype=dtype),
    )


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_bytes_are_those_of_the_messages(size: int, element_bytes: int) -> None:
    for _ in range(5):
        kv_heads = random.randint(1, 3)
        dims = random.choice([(16, 16), (24, 10), (3, 5)])
        shape = AttentionShape(kv_heads * random.randint(1, 3), kv_heads, *dims, element_bytes)
        if random.random() < 0.3:
            shape = replace(shape, row_dim=26, latent=20).absorbed
        lengths = tuple(random.randint(0, 50) for _ in range(3))
        cached = tuple(random.randint(0, 99) for _ in range(3))
        past = balanced(tokens(cached, (0, 0, 0)), size)
        layout = balanced(tokens(lengths, cached), size, np.array([np.diff(block.bounds) for block in past.stored]))
        table = TokenTable(size, 3)
        table.extend(past)
        table.extend(layout)
        new, kept = [len(block) for block in layout.tokens], table.counts().sum(1).tolist()
        for rank in range(size):
            call = message(shape, layout, rank)
            for method, form in (("pass_kv", KVFormat(call, table.tokens())), ("pass_q", QueryFormat(call))):
                forwarded = [source for source in range(size) if source != (rank + 1) % size]
                sent = sent_bytes(method, shape, new=new, kept=kept, rank=rank)
                assert sent[method] == sum(form.nbytes(source) for source in forwarded)
            returned = sent_bytes("pass_q", shape, new=new, kept=kept, rank=rank)["pass_q_return"]
            assert returned == (sum(new) - new[rank]) * shape.heads * (shape.value_dim + 1) * 4
            form = KVFormat(call, table.tokens())
            gathered = sent_bytes("all_gather", shape, new=new, kept=kept, rank=rank)
            assert gathered == {"all_gather": (size - 1) * max(form.nbytes(source) for source in range(size))}


def test_bytes_of_one_rank_and_of_replicated_queries() -> None:
    assert sent_bytes("pass_kv", LLAMA_405B, new=[5], kept=[9], rank=0) == {}
    sent = sent_bytes("replicated", LLAMA_405B, new=[3, 3, 3], kept=[9, 9, 9], rank=2)
    assert sent == {"replicated": 2 * 3 * 128 * 129 * 4}


def test_equations_4_to_7_of_kv_runahead() -> None:
    """Its example, keys and values counted apart: 36 entries for TSP, 22 for the chain; half of TSP's when even."""
    assert (2 * tsp_tokens((3, 3, 3)), 2 * chain_tokens((4, 3, 2))) == (36, 22)
    for size in range(1, 9):
        partition = (random.randint(1, 99),) * size
        assert 2 * chain_tokens(partition) == tsp_tokens(partition) == (size - 1) * sum(partition)


def test_bytes_of_the_chain() -> None:
    shape = AttentionShape(8, 2, 16, 16, 4)
    new, row = [4, 3, 0, 2, 0], 2 * 32 * 4
    for kept, ends in ((new, 3), ([0, 0, 0, 0, 9], 4)):
        sent = [sent_bytes("runahead", shape, new=new, kept=kept, rank=rank) for rank in range(5)]
        assert [found["runahead"] // row for found in sent] == [4, 7, 7, 9, 0][:ends] + [0] * (5 - ends)
    ring = sent_bytes("pass_kv", shape, new=new, kept=[5, 6, 7, 8, 9], rank=1)
    total = [12, 6, 7, 10, 9]
    both = sent_bytes("runahead", shape, new=new, kept=total, rank=1, cached=[5, 6, 7, 8, 9])
    assert both == {"runahead": 7 * row, **ring}


def test_bytes_of_a_last_layer_that_few_tokens_are_wanted_of() -> None:
    shape = AttentionShape(8, 2, 16, 16, 4)
    new, kept, wanted = [40, 30, 20], [41, 32, 23], [0, 1, 1]
    cached = [after - count for after, count in zip(kept, new, strict=True)]
    for rank in range(3):
        queries = sent_bytes("pass_q", shape, new=wanted, kept=kept, rank=rank)
        for method in ("pass_kv", "pass_q", "runahead"):
            sent = sent_bytes(method, shape, new=new, kept=kept, rank=rank, cached=cached, wanted=wanted)
            assert sent == queries
        for method in ("all_gather", "tsp", "tsp_causal"):
            sent = sent_bytes(method, shape, new=new, kept=kept, rank=rank, wanted=wanted)
            assert sent == sent_bytes(method, shape, new=new, kept=kept, rank=rank)
        gathering = sent_bytes("runahead", shape, new=new, kept=[0, 0, 90], rank=rank, wanted=wanted)
        assert gathering == sent_bytes("runahead", shape, new=new, kept=[0, 0, 90], rank=rank)


@pytest.mark.parametrize(
    ("new", "cached", "size", "message"),
    [
        ((0,), (5,), 2, "some token new"),
        ((-1, 5), (0, 0), 2, "0 or more"),
        ((1,), (-1,), 2, "0 or more"),
        ((1, 2), (3,), 2, "2 lengths of new tokens with 1"),
        ((1,), (0,), 0, "1 or more ranks"),
        ((), (), 2, "some token new"),
    ],
)
def test_impossible_workloads(new: tuple, cached: tuple, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(new, cached, size)


def test_workload() -> None:
    work = Workload((10, 0, 30), (60, 50, 50), 4)
    assert (work.total_new, work.total, work.miss_rate) == (40, 200, 0.2)
