"""Ragged heads attend as dense heads do under a mask of what was kept, and hold no more than that."""

import copy
import pickle
import time

import numpy as np
import pytest
import torch

from megakv.attention.merge import merge_by_owner
from megakv.attention.partial import PartialAttention, Scoring
from megakv.attention.reference import dense_attention
from megakv.cache.dense import DenseStore
from megakv.cache.ragged import RaggedStore
from megakv.cache.ragged_attention import RaggedPart
from megakv.cache.ragged_body import RaggedBody

DIM, VALUE_DIM = 16, 24


def dense(kv_heads: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(kv_heads, length, DIM, dtype=dtype), torch.randn(kv_heads, length, VALUE_DIM, dtype=dtype)


def skewed_mask(kv_heads: int, length: int) -> torch.Tensor:
    """Heads that keep nothing, one token, everything, and fractions between."""
    share = torch.rand(kv_heads, 1) ** 2
    mask = torch.rand(kv_heads, length) < share
    mask[0] = True
    mask[1] = False
    if kv_heads > 2:
        mask[2] = False
        mask[2, length // 2] = True
    return mask


def attend(
    q: torch.Tensor, body: RaggedBody, scoring: Scoring, value_dim: int = VALUE_DIM
) -> tuple[torch.Tensor, torch.Tensor]:
    """From right behind a body's tokens."""
    slots = np.arange(body.index.last_row + 1)
    partial = PartialAttention(q, np.arange(len(slots), len(slots) + q.shape[1]), scoring, value_dim)
    RaggedPart(0, body, slots, slots).add_to(partial)
    return partial.out, partial.lse


def masked_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible_KLS: torch.Tensor, scoring: Scoring, bias=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head by head in float64, with the whole score matrix."""
    group = q.shape[0] // k.shape[0]
    outs, lses = [], []
    for head in range(q.shape[0]):
        kv = head // group
        out, lse = dense_attention(
            q[head : head + 1],
            k[kv : kv + 1],
            v[kv : kv + 1],
            scoring.scale,
            visible_LS=visible_KLS[kv],
            softcap=scoring.softcap,
            bias_HLS=None if bias is None else bias[head : head + 1],
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize(("kv_heads", "group", "rows"), [(4, 1, 1), (3, 4, 1), (2, 8, 3), (3, 2, 40)])
@pytest.mark.parametrize("length", [1, 63, 700, 1500])
def test_ragged_attention_is_masked_dense(
    kv_heads: int, group: int, rows: int, length: int, softcap: float | None
) -> None:
    k, v = dense(kv_heads, length)
    mask = skewed_mask(kv_heads, length)
    body = RaggedBody.kept(k, v, mask, np.arange(length))
    assert body is not None and body.counts.tolist() == mask.sum(1).tolist()
    q = torch.randn(kv_heads * group, rows, DIM)
    scoring = Scoring(0.3, softcap=softcap)
    found, found_lse = attend(q, body, scoring)
    out, lse = masked_reference(q, k, v, mask[:, None].expand(-1, rows, -1), scoring)
    assert torch.allclose(found.double(), out, atol=1e-5, rtol=0)
    assert torch.allclose(found_lse.double(), lse, atol=1e-5, rtol=0)


def test_windows_and_alibi_go_by_slots_and_positions() -> None:
    k, v = dense(3, 500)
    mask = skewed_mask(3, 500)
    slots = np.sort(np.random.permutation(900)[:500])
    body = RaggedBody.kept(k, v, mask, np.arange(500))
    assert body is not None
    q = torch.randn(6, 2, DIM)
    q_slots = np.array([900, 903])
    slopes = torch.rand(6)
    scoring = Scoring(0.3, window=300, alibi_slopes=slopes)
    partial = PartialAttention(q, q_slots, scoring, VALUE_DIM)
    RaggedPart(0, body, slots, slots - 7).add_to(partial)
    near = torch.from_numpy(slots[None] > q_slots[:, None] - 300)
    bias = slopes.double()[:, None, None] * torch.from_numpy(slots[None] - 7 - q_slots[:, None])
    out, lse = masked_reference(q, k, v, mask[:, None] & near, scoring, bias)
    assert torch.allclose(partial.out.double(), out, atol=1e-5, rtol=0)
    assert torch.allclose(partial.lse.double(), lse, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_other_types(dtype: torch.dtype, bound: float) -> None:
    # So many that 16-bit ones are taken a few at a time.
    k, v = dense(3, 20_000, dtype)
    mask = skewed_mask(3, 20_000)
    body = RaggedBody.kept(k, v, mask, np.arange(20_000))
    assert body is not None
    q = torch.randn(6, 1, DIM, dtype=dtype)
    found, found_lse = attend(q, body, Scoring(0.3))
    out, lse = masked_reference(q, k, v, mask[:, None], Scoring(0.3))
    assert (found.double() - out).abs().max() < bound
    assert (found_lse.double() - lse)[mask.any(1).repeat_interleave(2)].abs().max() < bound


def test_copies_attend_to_their_own_tokens() -> None:
    k, v = dense(3, 700)
    body = RaggedBody.kept(k, v, skewed_mask(3, 700), np.arange(700))
    assert body is not None
    q = torch.randn(6, 1, DIM)
    expected = attend(q, body, Scoring(0.3))
    copies = copy.deepcopy(body), pickle.loads(pickle.dumps(body))
    body.block.fill_(torch.nan)
    for other in copies:
        assert all(map(torch.equal, attend(q, other, Scoring(0.3)), expected))


def test_tokens_of_another_type_than_queries() -> None:
    k, v = dense(2, 600, torch.bfloat16)
    mask = torch.rand(2, 600) < 0.7
    body = RaggedBody.kept(k, v, mask, np.arange(600))
    assert body is not None
    q = torch.randn(4, 1, DIM)
    found = attend(q, body, Scoring(0.3))
    for one, other in zip(found, masked_reference(q, k, v, mask[:, None], Scoring(0.3)), strict=True):
        assert torch.allclose(one.double(), other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_values_that_are_columns_of_keys(softcap: float | None) -> None:
    k, mask = torch.randn(3, 700, DIM), skewed_mask(3, 700)
    body = RaggedBody.kept(k, k[..., :0], mask, np.arange(700))
    assert body is not None and body.block.shape == (int(mask.sum()), DIM)
    q = torch.randn(6, 1, DIM)
    found = attend(q, body, Scoring(0.3, softcap=softcap, value_columns=DIM // 2), DIM // 2)
    expected = masked_reference(q, k, k[..., : DIM // 2], mask[:, None], Scoring(0.3, softcap=softcap))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, atol=1e-5, rtol=0)


def test_parts_without_keys_are_neutral() -> None:
    out, lse = merge_by_owner(torch.zeros(1, 2, 3), torch.full((1, 2), -torch.inf), torch.tensor([1]), 2)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_bodies_hold_exactly_what_was_kept() -> None:
    k, v = dense(5, 2000)
    mask = skewed_mask(5, 2000)
    rows = np.arange(2000) + 17
    body = RaggedBody.kept(k, v, mask, rows)
    assert body is not None
    kept_bytes = int(mask.sum()) * (DIM + VALUE_DIM) * 4
    assert body.nbytes() <= 1.05 * kept_bytes
    keys, values, found = body.flat()
    head, place = mask.nonzero(as_tuple=True)
    assert torch.equal(keys, k[head, place]) and torch.equal(values, v[head, place])
    assert np.array_equal(found, place.numpy() + 17)
    again = RaggedBody.packed(keys, values, body.counts, found)
    assert again is not None and torch.equal(again.block, body.block)
    shorter = body.below(1017)
    assert shorter is not None
    assert shorter.counts.tolist() == mask[:, :1000].sum(1).tolist()
    assert body.below(17) is None and body.below(5000) is body


def test_memory_is_that_of_the_kept_tokens() -> None:
    store = RaggedStore(2, DenseStore(2))
    masks = []
    for sequence, length in enumerate((900, 1300)):
        store.append(sequence, *dense(4, length))
        masks.append(skewed_mask(4, length))
        store.compress(sequence, masks[-1])
    for _ in range(300):
        for sequence in range(2):
            store.append(sequence, *dense(4, 1))
    kept = sum(int(mask.sum()) for mask in masks) + 2 * 4 * 300
    assert sum(int(store.kept(sequence).sum()) for sequence in range(2)) == kept
    assert store.nbytes() <= 1.05 * kept * (DIM + VALUE_DIM) * 4


def attended(store: RaggedStore, sequence: int, q: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = np.arange(total)
    partial = PartialAttention(q, np.array([total]), Scoring(0.3), VALUE_DIM)
    for part in store.parts(sequence, slots, slots):
        part.add_to(partial)
    return partial.out, partial.lse


@pytest.mark.parametrize("batch", [1, 5])
def test_a_store_through_its_life(batch: int) -> None:
    """Compressed twice, 300 tokens appended, cropped, reordered and forked: always the masked dense attention."""
    store = RaggedStore(batch, DenseStore(batch))
    keys, values, masks = [], [], []
    for sequence in range(batch):
        length = int(np.random.randint(1, 700))
        k, v = dense(4, length)
        store.append(sequence, k, v)
        mask = skewed_mask(4, length)
        store.compress(sequence, mask)
        more_k, more_v = dense(4, 300)
        for step in range(100):
            store.append(sequence, more_k[:, step : step + 1], more_v[:, step : step + 1])
        second = skewed_mask(4, 100)
        store.compress(sequence, second)
        for step in range(100, 300):
            store.append(sequence, more_k[:, step : step + 1], more_v[:, step : step + 1])
        keys.append(torch.cat([k, more_k], dim=1))
        values.append(torch.cat([v, more_v], dim=1))
        masks.append(torch.cat([mask, second, torch.ones(4, 200, dtype=torch.bool)], dim=1))

    def check(found: RaggedStore, row: int, source: int, length: int) -> None:
        q = torch.randn(8, 1, DIM)
        out, lse = attended(found, row, q, length)
        visible = masks[source][:, None, :length]
        expected, expected_lse = masked_reference(
            q, keys[source][:, :length], values[source][:, :length], visible, Scoring(0.3)
        )
        assert torch.allclose(out.double(), expected, atol=1e-5, rtol=0)
        assert torch.allclose(lse.double(), expected_lse, atol=1e-5, rtol=0)

    lengths = [k.shape[1] for k in keys]
    for row in range(batch):
        check(store, row, row, lengths[row])
    order = [batch - 1, 0, 0]
    twin = store.fork()
    twin.reorder(order)
    for row, source in enumerate(order):
        check(twin, row, source, lengths[source])
    for cut in (150, 250, 290):
        shorter = store.fork()
        left = [max(length - cut, 1) for length in lengths]
        for row in range(batch):
            shorter.crop(row, left[row])
        for row in range(batch):
            check(shorter, row, row, left[row])
            assert shorter.kept(row).tolist() == masks[row][:, : left[row]].sum(1).tolist()
    for row in range(batch):
        check(store, row, row, lengths[row])


def test_time_goes_with_what_was_kept() -> None:
    """One head that keeps everything costs less than half of what eight such heads, a padded form, would."""
    length = 16384
    k, v = torch.randn(8, length, 64), torch.randn(8, length, 64)
    mask = torch.zeros(8, length, dtype=torch.bool)
    mask[0] = True
    mask[1:, ::64] = True
    ragged = RaggedBody.kept(k, v, mask, np.arange(length))
    full = RaggedBody.kept(k, v, torch.ones_like(mask), np.arange(length))
    assert ragged is not None and full is not None
    q = torch.randn(32, 1, 64)

    def seconds(body: RaggedBody) -> float:
        start = time.thread_time()
        attend(q, body, Scoring(0.125), 64)
        return time.thread_time() - start

    # By turns, and this thread's own time: whatever else the machine does comes to both.
    times = [(seconds(ragged), seconds(full)) for _ in range(15)]
    assert min(one for one, _ in times) < 0.5 * min(other for _, other in times)
