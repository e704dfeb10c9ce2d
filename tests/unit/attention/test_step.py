"""A step of decoding in one compiled call against float64, and stores whose rows it writes against others."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megakv.attention.compiled import RowTable, Run
from megakv.attention.merge import add_sinks
from megakv.attention.reference import Scoring, dense_attention
from megakv.attention.step import TokenStep, load_step
from megakv.cache.dense import DenseStore
from tests.pairs import without_pairs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW_QUERIES = 32
"""Of a KV head, up to which weights are never rounded."""


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
    """Rows of one rank in random runs, each in memory of its own; so many of the last ones are not written."""

    def __init__(self, k_BKSD, v_BKSD, rows, unwritten):
        self.held, runs = [], []
        for sequence, (k, v, own) in enumerate(zip(k_BKSD, v_BKSD, rows, strict=True)):
            # Some pieces are empty.
            bounds = sorted([0, len(own), *(between(0, len(own)) for _ in range(between(0, 3)))])
            bounds += [len(own)] * between(0, 1)
            pieces = [own[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
            pairs = [tuple(self.laid(each[:, piece].clone()) for each in (k, v)) for piece in pieces]
            self.held.append(pairs)
            runs.append([Run.of(*pair) for pair in pairs])
            missing = unwritten[sequence]
            for pair in reversed(pairs):
                length = pair[0].shape[1]
                for each in pair:
                    each[:, max(0, length - missing) :] = torch.nan
                missing = max(0, missing - length)
        self.first = [between(0, 9) for _ in rows]
        self.table = RowTable.of(runs, self.first, k_BKSD.dtype)

    @staticmethod
    def laid(rows):
        """Heads behind one another, or side by side within a token."""
        return rows if torch.rand(()) < 0.5 else rows.transpose(0, 1).contiguous().transpose(0, 1)

    def in_place(self, new, k_KLD, v_KLD):
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
    # New rows of each sequence: one, or some of their own number.
    most = between(1, 40)
    counts = [1 if most < 20 else between(0, min(most, length)) for _ in range(batch)]
    bounds = [0, *itertools.accumulate(counts)]
    places = [(b, slot) for b, count in enumerate(counts) for slot in range(length - count, length)]
    rows = len(places)
    q = torch.randn(1, heads, rows, dim).to(dtype)
    k, v = (torch.randn(batch, kv_heads, length, width).to(dtype) for width in (dim, value_dim))
    new = [
        torch.stack([each[b, :, slot] for b, slot in places], 1)[None]
        if rows
        else each.new_empty(1, kv_heads, 0, width)
        for each, width in ((k, dim), (v, value_dim))
    ]
    if torch.rand(()) < 0.5:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    window = between(1, length + 9) if torch.rand(()) < 0.5 else None
    pairs = not without_pairs() and bool(torch.rand(()) < 0.5)
    sinks = torch.randn(heads).to(dtype) if torch.rand(()) < 0.5 else None
    scoring = Scoring(dim**-0.5, window)
    # Which rank has a token is drawn; only its owner has a new one.
    owners = torch.randint(ranks, (batch, length))
    parts, results = [], []
    for rank in range(ranks):
        own = [torch.nonzero(owners[b] == rank).flatten() for b in range(batch)]
        stored = [row for row, (b, slot) in enumerate(places) if owners[b, slot] == rank]
        unwritten = [int((slots >= length - count).sum()) for slots, count in zip(own, counts, strict=True)]
        store = Rows(k, v, own, unwritten)

        def seen(window, own=own, store=store):
            return np.array([int((own[b] <= slot - window).sum()) + store.first[b] for b, slot in places])

        def gather(partial, layer):
            parts.append(partial)
            return torch.stack(parts)

        step = TokenStep(kernel, bounds, stored, seen, gather if ranks > 1 else None, compute, pairs=pairs)
        assert step.computes(q, *new, scoring)
        results.append(step.attend(0, store, q, *new, scoring, sinks))
        for b, slots in enumerate(own):
            for kind, given in enumerate((k, v)):
                held = [pair[kind] for pair in store.held[b]]
                if held:
                    assert torch.equal(torch.cat(held, 1), given[b][:, slots])
    found = results[-1]
    assert (found.dtype, found.shape) == (dtype, (1, rows, heads, value_dim))
    for row, (b, slot) in enumerate(places):
        see = slice(0 if window is None else max(0, slot + 1 - window), slot + 1)
        expected, lse = dense_attention(q[0, :, row, None], k[b, :, see], v[b, :, see], scoring.scale)
        if sinks is not None:
            expected = add_sinks(expected, lse, sinks)
        error = (found[0, row].double() - expected[:, 0]).abs()
        rounds = pairs and dtype == torch.bfloat16 and group * counts[b] > FEW_QUERIES
        # Weights that are rounded are a unit off, but no sum of values is, by more than half of one of the largest.
        added = 0.5 * torch.finfo(dtype).eps * v[b].double().abs().max() if rounds else 0.0
        assert (error <= 0.5001 * torch.finfo(dtype).eps * expected[:, 0].abs() + 4e-6 + added).all()


def test_what_it_does_not_compute(kernel):
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    step = TokenStep(kernel, range(3), [0, 1], lambda window: np.zeros(2, dtype=np.int64), None, compute)
    plain = Scoring(1.0)
    assert step.computes(q, k, v, plain)
    assert not step.computes(q, k.bfloat16(), v, plain)
    assert not step.computes(*(each.double() for each in (q, k, v)), plain)
    assert not step.computes(q[:, :, :1], k[:, :, :1], v[:, :, :1], plain)
    assert not step.computes(q, k, v, Scoring(1.0, softcap=30.0))
    assert not step.computes(q, k, v, Scoring(-1.0))
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
    counts = [between(1, 3) if between(0, 3) == 0 else 1 for _ in range(batch)]
    bounds = [0, *itertools.accumulate(counts)]
    runs = [range(*bounds[b : b + 2]) for b in range(batch)]
    q = torch.randn(1, 2 * kv_heads, bounds[-1], dim)
    k, v = (torch.randn(1, kv_heads, bounds[-1], width) for width in (dim, value_dim))
    for b in stored:
        other.append(b, k[0][:, runs[b]], v[0][:, runs[b]])
    kept = [row for b in stored for row in runs[b]]
    step = TokenStep(kernel, bounds, kept, lambda window: np.zeros(bounds[-1], dtype=np.int64), None, compute)
    found = step.attend(0, own, q, k, v, Scoring(0.3), None)
    for b in range(batch):
        for behind, row in enumerate(reversed(runs[b])):
            hidden = behind if b in stored else 0
            if (rows := other.rows(b) - other.gone(b) - hidden) > 0:
                keys, values = (each[:, :rows] for each in joined(other, b))
                expected, _ = dense_attention(q[0, :, row, None], keys, values, 0.3)
                torch.testing.assert_close(found[0, row].double(), expected[:, 0], rtol=1e-5, atol=1e-5)
            else:
                assert not found[0, row].any()


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
    assert store.in_place([1], new, new) is None
    assert store.rows(0) == 3
