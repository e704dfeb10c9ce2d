"""A step of decoding in one compiled call against float64, and stores whose rows it writes against others."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megakv.attention.compiled import Run
from megakv.attention.merge import add_sinks
from megakv.attention.reference import Scoring, dense_attention
from megakv.attention.step import RowTable, TokenStep, load_step
from megakv.cache.dense import DenseStore

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def kernel():
    found, reason = load_step()
    if found is None:
        pytest.skip(f"no compiled kernel: {reason}")
    return found


def compute(name, layer):
    return contextlib.nullcontext()


def between(low, high):
    return int(torch.randint(low, high + 1, ()))


class Rows:
    """Rows of one rank in random runs, each in memory of its own; the last ones of some sequences are not written."""

    def __init__(self, k_BKSD, v_BKSD, rows, stored):
        self.held, runs = [], []
        for sequence, (k, v, own) in enumerate(zip(k_BKSD, v_BKSD, rows, strict=True)):
            bounds = sorted({0, len(own), *(between(0, len(own)) for _ in range(between(0, 3)))})
            pieces = [own[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
            pairs = [tuple(self.laid(each[:, piece].clone()) for each in (k, v)) for piece in pieces]
            self.held.append(pairs)
            runs.append([Run.of(*pair) for pair in pairs])
            if sequence in stored:
                for each in pairs[-1]:
                    each[:, -1] = torch.nan
        self.first = [between(0, 9) for _ in rows]
        self.table = RowTable.of(runs, self.first, k_BKSD.dtype)

    @staticmethod
    def laid(rows):
        """Heads behind one another, or side by side within a token."""
        return rows if torch.rand(()) < 0.5 else rows.transpose(0, 1).contiguous().transpose(0, 1)

    def in_place(self, sequences, k_KLD, v_KLD):
        return self.table


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_together_give_what_float64_gives(kernel, dtype, threads):
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        for _ in range(40):
            pool.submit(compare, kernel, dtype).result()


def compare(kernel, dtype):
    batch, kv_heads, group, ranks = between(1, 5), between(1, 3), between(1, 5), between(1, 3)
    dim, value_dim, length = between(1, 70), between(1, 70), between(1, 300)
    heads = kv_heads * group
    q = torch.randn(1, heads, batch, dim).to(dtype)
    k, v = (torch.randn(batch, kv_heads, length, width).to(dtype) for width in (dim, value_dim))
    new = [each[:, :, -1].transpose(0, 1)[None] for each in (k, v)]
    if torch.rand(()) < 0.5:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    window = between(1, length + 9) if torch.rand(()) < 0.5 else None
    sinks = torch.randn(heads).to(dtype) if torch.rand(()) < 0.5 else None
    scoring = Scoring(dim**-0.5, window)
    # Which rank has a token is drawn; the last one is the new one, which only its owner has.
    owners = torch.randint(ranks, (batch, length))
    parts, results = [], []
    for rank in range(ranks):
        own = [torch.nonzero(owners[b] == rank).flatten() for b in range(batch)]
        stored = [b for b in range(batch) if owners[b, -1] == rank]
        store = Rows(k, v, own, stored)

        def seen(window, own=own, store=store):
            before = [int((rows < length - window).sum()) for rows in own]
            return np.array(before) + store.first

        def gather(partial, layer):
            parts.append(partial)
            return torch.stack(parts)

        step = TokenStep(kernel, batch, stored, seen, gather if ranks > 1 else None, compute)
        assert step.computes(q, *new, scoring)
        results.append(step.attend(0, store, q, *new, scoring, sinks))
        for b in stored:
            for held, given in zip(store.held[b][-1], (k, v), strict=True):
                assert torch.equal(held[:, -1], given[b, :, -1])
    found = results[-1]
    assert (found.dtype, found.shape) == (dtype, (1, batch, heads, value_dim))
    first = 0 if window is None else max(0, length - window)
    for b in range(batch):
        expected, lse = dense_attention(q[0, :, b, None], k[b, :, first:], v[b, :, first:], scoring.scale)
        if sinks is not None:
            expected = add_sinks(expected, lse, sinks)
        error = (found[0, b].double() - expected[:, 0]).abs()
        assert (error <= 0.5001 * torch.finfo(dtype).eps * expected[:, 0].abs() + 3e-6).all()


def test_what_it_does_not_compute(kernel):
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    step = TokenStep(kernel, 2, [0, 1], lambda window: np.zeros(2, dtype=np.int64), None, compute)
    plain = Scoring(1.0)
    assert step.computes(q, k, v, plain)
    assert not step.computes(q, k.bfloat16(), v, plain)
    assert not step.computes(*(each.double() for each in (q, k, v)), plain)
    assert not step.computes(q[:, :, :1], k[:, :, :1], v[:, :, :1], plain)
    assert not step.computes(q, k, v, Scoring(1.0, softcap=30.0))
    assert not step.computes(q, k, v, Scoring(1.0, alibi_slopes=torch.ones(4)))
    assert not step.computes(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, plain)


def test_a_store_whose_rows_are_written_holds_what_one_holds_that_appends(kernel):
    for _ in range(30):
        batch, kv_heads, dim, value_dim = between(1, 4), between(1, 3), between(1, 9), between(1, 9)
        own, other = DenseStore(batch), DenseStore(batch)
        kept = []
        for _ in range(60):
            index = torch.randperm(batch)[: between(1, batch)].sort().values.tolist()
            sequence = between(0, batch - 1)
            match between(0, 11):
                case 0:
                    rows = between(1, 40)
                    k, v = (torch.randn(kv_heads, rows, width) for width in (dim, value_dim))
                    own.append(sequence, k, v)
                    other.append(sequence, k, v)
                case 1:
                    length = between(own.gone(sequence), own.rows(sequence))
                    own.crop(sequence, length)
                    other.crop(sequence, length)
                case 2:
                    rows = between(own.gone(sequence), own.rows(sequence))
                    own.forget(sequence, rows)
                    other.forget(sequence, rows)
                case 3:
                    order = torch.randint(batch, (batch,)).tolist()
                    own.reorder(order)
                    other.reorder(order)
                case 4:
                    kept.append((own, other))
                    own, other = own.fork(), other.fork()
                case 5 if kept:
                    kept.append((own, other))
                    own, other = kept.pop(0)
                case _:
                    step_both(kernel, own, other, batch, index, kv_heads, dim, value_dim)
            for mine, yours in ((own, other), *kept):
                assert_alike(mine, yours, batch)


def step_both(kernel, own, other, batch, stored, kv_heads, dim, value_dim):
    q = torch.randn(1, 2 * kv_heads, batch, dim)
    k, v = (torch.randn(1, kv_heads, batch, width) for width in (dim, value_dim))
    other.append_each(stored, k[0][:, stored], v[0][:, stored])
    step = TokenStep(kernel, batch, stored, lambda window: np.zeros(batch, dtype=np.int64), None, compute)
    found = step.attend(0, own, q, k, v, Scoring(0.3), None)
    for b in range(batch):
        if other.rows(b) > other.gone(b):
            expected, _ = dense_attention(q[0, :, b, None], *joined(other, b), 0.3)
            torch.testing.assert_close(found[0, b].double(), expected[:, 0], rtol=1e-5, atol=1e-5)
        else:
            assert not found[0, b].any()


def joined(store, sequence):
    """All rows, which stay where they are."""
    return [torch.cat(each, dim=1) for each in zip(*store.runs(sequence), strict=True)]


def assert_alike(own, other, batch):
    assert own.nbytes() == other.nbytes()
    for b in range(batch):
        assert (own.rows(b), own.gone(b)) == (other.rows(b), other.gone(b))
        if own.rows(b) > own.gone(b):
            assert all(map(torch.equal, joined(own, b), joined(other, b)))


def test_rows_of_another_type_are_left_alone():
    store = DenseStore(1)
    store.append(0, torch.randn(1, 3, 4), torch.randn(1, 3, 4))
    new = torch.randn(1, 1, 4).bfloat16()
    assert store.in_place([0], new, new) is None
    assert store.rows(0) == 3
