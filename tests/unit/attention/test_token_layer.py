"""A whole layer of a step of decoding in one compiled call, on ranks that divide it, against float64."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.attention.compiled import RowTable, RowTables, Run
from megakv.attention.layer import (
    ACTIVATIONS,
    TOLERANCE,
    LayerCalls,
    LayerWeights,
    Weight,
    load_layer,
)
from megakv.attention.reference import dense_attention
from megakv.attention.step import TokenStep, load_step
from megakv.attention.token_layer import LayerRanks, WholeLayer, WholeLayersCall
from megakv.distributed.ledger import Ledger
from tests.drawn_layers import random_layer, reference
from tests.pairs import without_pairs
from tests.unit.test_channel import channels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def without_gradients():
    for found, reason in (load_layer(), load_step()):
        if found is None:
            pytest.skip(f"no compiled kernel: {reason}")
    with torch.no_grad():
        yield


def between(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def runs(total: int, ranks: int) -> list[tuple[int, int]]:
    """Cut anywhere: some have nothing."""
    return list(pairwise([0, *sorted(between(0, total) for _ in range(ranks - 1)), total]))


def cut(part: Weight, *, rows: slice = slice(None), columns: slice = slice(None), bias: bool = True) -> Weight:
    return Weight(part.weight[rows, columns], part.bias[rows] if bias and part.bias is not None else None)


class Drawn:
    """A layer, and a new token of each of some sequences whose rows lie on several ranks."""

    def __init__(self, dtype: torch.dtype):
        kv_heads = between(1, 3)
        sizes = {"hidden": between(1, 100), "heads": kv_heads * between(1, 4), "kv_heads": kv_heads}
        sizes |= {"head_dim": 2 * between(1, 30), "width": between(1, 150)}
        activation = between(0, len(ACTIVATIONS) - 1)
        weights = random_layer(dtype, torch.default_generator, activation=activation, **sizes)
        self.weights = replace(weights, pairs=not without_pairs() and bool(torch.rand(()) < 0.5))
        self.dim, self.scale = sizes["head_dim"], sizes["head_dim"] ** -0.5
        self.ranks, self.batch, length = between(1, 3), between(1, 24), between(1, 90)
        shape = (self.batch, kv_heads, length, self.dim)
        self.k, self.v = (torch.randn(shape).to(dtype) for _ in range(2))
        self.x, self.cos, self.sin = (
            torch.randn(self.batch, size).to(dtype) for size in (sizes["hidden"], self.dim, self.dim)
        )
        self.window = between(1, length + 5) if torch.rand(()) < 0.5 else None
        self.owners = torch.randint(self.ranks, (self.batch, length))
        self.divided = {name: self.ranks > 1 and bool(torch.rand(()) < 0.7) for name in ("in", "out", "ff")}
        whole = self.weights
        self.inputs = runs(sum(len(part.weight) for part in (whole.q, whole.k, whole.v)), self.ranks)
        self.outputs = runs(whole.o.weight.shape[1], self.ranks)
        self.inner = runs(sizes["width"], self.ranks)

    def own(self, rank: int) -> LayerWeights:
        """What a rank computes."""
        whole, parts, first = self.weights, dict[str, Any](), 0
        for name in ("q", "k", "v"):
            part = getattr(whole, name)
            start, stop = (min(max(edge - first, 0), len(part.weight)) for edge in self.inputs[rank])
            parts[name] = cut(part, rows=slice(start, stop)) if self.divided["in"] else part
            first += len(part.weight)
        if self.divided["out"]:
            parts["o"] = cut(whole.o, columns=slice(*self.outputs[rank]), bias=False)
        if self.divided["ff"]:
            run = slice(*self.inner[rank])
            parts |= {name: cut(getattr(whole, name), rows=run) for name in ("gate", "up")}
            parts["down"] = cut(whole.down, columns=run, bias=False)
        return LayerWeights(**{**vars(whole), **parts})

    def call(self, rank: int, channel: Any) -> tuple[Tensor, list[Any], list[Any]]:
        """What a rank finds, where it spent its time, and the rows that it then holds."""
        kernel, step = load_layer()[0], load_step()[0]
        assert kernel is not None and step is not None
        new = self.k.shape[2] - 1
        own = [torch.nonzero(self.owners[b] == rank).flatten() for b in range(self.batch)]
        stored = [b for b in range(self.batch) if self.owners[b, new] == rank]
        held = [[each[b][:, rows].clone() for each in (self.k, self.v)] for b, rows in enumerate(own)]
        for b in stored:
            for each in held[b]:
                each[:, -1] = torch.nan
        some = [[Run.of(k, v)] if k.shape[1] else [] for k, v in held]
        table = RowTable.of(some, [0] * self.batch, self.k.dtype)
        window = self.window

        def seen(_: int) -> Any:
            assert window is not None
            return np.array([int((rows <= new - window).sum()) for rows in own], dtype=np.int64)

        ranks = LayerRanks(
            inputs=channel if self.divided["in"] else None,
            partial=channel,
            outputs=channel if self.divided["out"] else None,
            feed_forward=channel if self.divided["ff"] else None,
            widths=[stop - start for start, stop in self.inputs] if self.divided["in"] else (),
            columns=self.outputs[rank],
            outputs_bias=self.weights.o.bias,
            feed_forward_bias=self.weights.down.bias,
        )
        call = WholeLayersCall([WholeLayer(LayerCalls(kernel, self.own(rank)), ranks, self.scale)])
        one = TokenStep(step, range(self.batch + 1), stored, seen, None, Ledger().compute)
        out, (moments,) = call(self.x, self.cos, self.sin, one, RowTables.of([table]), window)
        return out, moments, [held[b] for b in stored]

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output, and new keys and values, in float64."""
        x, cos, sin = (each.double() for each in (self.x, self.cos, self.sin))
        width = self.weights.heads * self.dim
        q, k, v, _ = reference(self.weights, x, cos, sin, x.new_zeros(self.batch, width))
        q, k, v = (each.unflatten(1, (-1, self.dim)) for each in (q, k, v))
        keys, values = (torch.cat((each[:, :, :-1].double(), new[:, :, None]), 2) for each, new in
                        ((self.k, k), (self.v, v)))  # fmt: skip
        first = 0 if self.window is None else max(0, keys.shape[2] - self.window)
        attended = [
            dense_attention(q[b, :, None], keys[b, :, first:], values[b, :, first:], self.scale)[0][:, 0].flatten()
            for b in range(self.batch)
        ]
        return reference(self.weights, x, cos, sin, torch.stack(attended))[3], k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_find_what_float64_does_and_all_the_same(dtype: torch.dtype, threads: int) -> None:
    for _ in range(25):
        drawn = Drawn(dtype)
        group = channels([list(range(drawn.ranks))]) if drawn.ranks > 1 else [None]
        with ThreadPoolExecutor(drawn.ranks, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            found = list(pool.map(lambda rank: drawn.call(rank, group[rank]), range(drawn.ranks)))  # noqa: B023
        expected, k, v = drawn.expected()
        size = 1e-3 + float(expected.abs().max())
        for rank, (out, moments, stored) in enumerate(found):
            assert torch.equal(out, found[0][0])
            assert float((out.double() - expected).abs().max()) <= 2 * TOLERANCE[dtype] * size
            rows = [b for b in range(drawn.batch) if drawn.owners[b, -1] == rank]
            for b, pair in zip(rows, stored, strict=True):
                for own, new in zip(pair, (k, v), strict=True):
                    error = (own[:, -1].double() - new[b]).abs().max()
                    assert float(error) <= 2 * TOLERANCE[dtype] * float(1e-3 + new.abs().max())
            check_moments(drawn, moments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_in_one_call_are_those_of_a_call_each(dtype: torch.dtype) -> None:
    """All of them, or the first ones."""
    kernel, step = load_layer()[0], load_step()[0]
    assert kernel is not None and step is not None
    for _ in range(10):
        count, batch, dim = between(1, 5), between(1, 24), 2 * between(1, 30)
        kv_heads, hidden, some = between(1, 3), between(1, 100), between(1, count)
        sizes = {
            "hidden": hidden,
            "heads": 2 * kv_heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
            "width": between(1, 90),
        }
        drawn = [random_layer(dtype, torch.default_generator, activation=0, **sizes) for _ in range(count)]
        layers = [WholeLayer(LayerCalls(kernel, weights), LayerRanks(), dim**-0.5) for weights in drawn]
        x, cos, sin = (torch.randn(batch, size).to(dtype) for size in (hidden, dim, dim))
        one = TokenStep(step, range(batch + 1), range(batch), np.zeros, None, Ledger().compute)
        lengths = [between(1, 40) for _ in range(batch)]
        rows = [[torch.randn(2, kv_heads, length, dim).to(dtype) for length in lengths] for _ in layers]
        together, apart = ([[each.clone() for each in own] for own in rows] for _ in range(2))
        tables, others = (
            [RowTable.of([[Run.of(*each)] for each in own], [0] * len(own), dtype) for own in held]
            for held in (together, apart)
        )
        out, moments = WholeLayersCall(layers)(x, cos, sin, one, RowTables.of(tables[:some]), None)
        for layer, table in zip(layers[:some], others, strict=False):
            x = WholeLayersCall([layer])(x, cos, sin, one, RowTables.of([table]), None)[0]
        assert torch.equal(out, x) and len(moments) == some
        for own, other in zip(together, apart, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
        begins = [part.begin for parts in moments for part in parts]
        assert begins == sorted(begins)


def check_moments(drawn: Drawn, moments: list[Any]) -> None:
    """They follow one another; bytes are those of messages to all others."""
    others, size, batch = drawn.ranks - 1, drawn.x.element_size(), drawn.batch
    row = drawn.x.shape[1] * size
    sent = {"attention": 0}
    if others:
        sent["partial"] = drawn.weights.heads * (drawn.dim + 1) * 4
        sent |= {name: row for name, kind in (("outputs", "out"), ("feed_forward", "ff")) if drawn.divided[kind]}
        if drawn.divided["in"]:
            sent["inputs"] = max(stop - start for start, stop in drawn.inputs) * size
    assert {moment.part: moment.sent for moment in moments} == {k: n * others * batch for k, n in sent.items()}
    times = [time for moment in moments for time in (moment.begin, moment.end)]
    assert times == sorted(times) and times[0] >= 0


def test_a_rank_that_does_not_come_is_an_error_and_no_other_is() -> None:
    drawn = Drawn(torch.float32)
    while drawn.ranks == 1:
        drawn = Drawn(torch.float32)
    group = channels([list(range(drawn.ranks))], timeout_s=0.2)
    with pytest.raises(torch.distributed.DistNetworkError, match=r"Timed out after 0\.2 s"):
        drawn.call(0, group[0])
