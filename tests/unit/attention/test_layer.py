"""What a decoder layer does around attention, in compiled calls, against float64 and PyTorch's own steps."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from megakv.attention.layer import LayerCalls, LayerWeights, Weight, load_layer
from tests.drawn_layers import drawn, drawn_layer, reference


@pytest.fixture
def kernel():
    found, reason = load_layer()
    if found is None:
        pytest.skip(f"no compiled kernel: {reason}")
    return found


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_at_least_as_exact_as_pytorch_s(kernel, dtype, threads):
    own, torchs = [], []
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        for _ in range(40):
            weights, rows = drawn_layer(dtype), drawn(64)
            hidden, width = len(weights.input_norm.weight), weights.heads * weights.head_dim
            sizes = (hidden, weights.head_dim, weights.head_dim, width)
            given = [torch.randn(rows, size).to(dtype) for size in sizes]
            x, cos, sin, attended = given
            calls = LayerCalls(kernel, weights)
            packed = pool.submit(calls.project, x, cos, sin, whole=True).result()
            middle, out = pool.submit(calls.feed_forward, x, attended, projected=False, whole=True).result()
            found = [part[0].transpose(0, 1).flatten(1) for part in calls.heads(packed)]
            expected = reference(weights, *(each.double() for each in given))
            for index, right in enumerate(expected):
                size = right.square().mean().sqrt() + 1e-3
                theirs = reference(weights, *given)[index].double()
                mine = (*found, out)[index].double()
                own.append(((mine - right) / size).square().flatten())
                torchs.append(((theirs - right) / size).square().flatten())
            # What ranks sum up, and what was projected by itself, are the same numbers.
            projected = torch.nn.functional.linear(attended.double(), weights.o.weight.double())
            if weights.o.bias is not None:
                projected += weights.o.bias.double()
            _, part = calls.feed_forward(x, projected.to(dtype), projected=True, whole=False)
            torch.testing.assert_close(
                (middle + part).double(), out.double(), rtol=0.1, atol=0.1 * float(out.abs().max())
            )
    assert torch.cat(own).mean().sqrt() <= 1.05 * torch.cat(torchs).mean().sqrt()


def test_pairs_where_there_may_be_none(kernel):
    """Of few rows and many: compiled without them, the same is computed without."""
    for rows in (4, 17, 40, 200):
        weights = replace(drawn_layer(torch.bfloat16), pairs=True)
        sizes = len(weights.input_norm.weight), weights.heads * weights.head_dim
        x, attended = (torch.randn(rows, size).bfloat16() for size in sizes)
        angles = torch.ones(rows, weights.head_dim).bfloat16(), torch.zeros(rows, weights.head_dim).bfloat16()
        _, found = LayerCalls(kernel, weights).feed_forward(x, attended, projected=False, whole=True)
        right = reference(weights, *(each.double() for each in (x, *angles, attended)))[-1]
        torch.testing.assert_close(found.double(), right, rtol=0.1, atol=0.03 * float(right.abs().max()))


def test_ranks_with_a_part_each(kernel):
    """Rows of queries, keys and values, wherever they are cut, and columns of the feed-forward: together the whole."""
    for _ in range(30):
        whole, rows = drawn_layer(torch.float32), drawn(9)
        hidden, dim, width = len(whole.input_norm.weight), whole.head_dim, len(whole.gate.weight)
        x, cos, sin = (torch.randn(rows, size) for size in (hidden, dim, dim))
        everything = LayerCalls(kernel, whole)
        stop, column = drawn(len(whole.q.weight) + 2 * len(whole.k.weight)) - 1, drawn(width) - 1
        packed, parts_of, first = [], [], (0, stop, sum(len(part.weight) for part in (whole.q, whole.k, whole.v)))
        for rank, columns in enumerate((slice(0, column), slice(column, width))):
            parts, at = {}, 0
            for name in ("q", "k", "v"):
                part = getattr(whole, name)
                span = slice(*(min(max(edge - at, 0), len(part.weight)) for edge in first[rank : rank + 2]))
                parts[name] = cut(part, span)
                at += len(part.weight)
            parts |= {name: cut(getattr(whole, name), columns) for name in ("gate", "up")}
            down = Weight(whole.down.weight[:, columns], None if rank else whole.down.bias)
            own = LayerCalls(kernel, LayerWeights(**{**vars(whole), **parts, "down": down}))
            packed.append(own.project(x, cos, sin, whole=False))
            middle, part = own.feed_forward(x, x, projected=True, whole=False)
            parts_of.append(part)
        together = torch.cat(packed, dim=1)
        everything.rotate(together, cos, sin)
        torch.testing.assert_close(together, everything.project(x, cos, sin, whole=True), rtol=1e-4, atol=1e-4)
        _, expected = everything.feed_forward(x, x, projected=True, whole=True)
        bias = torch.randn(hidden)
        total = everything.add(middle, torch.stack(parts_of), bias)
        torch.testing.assert_close(total, expected + bias, rtol=1e-4, atol=1e-4)


def cut(part, rows):
    return Weight(part.weight[rows], None if part.bias is None else part.bias[rows])
