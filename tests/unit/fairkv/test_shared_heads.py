"""Heads shared by ranks: stores that hold parts of their tokens, and the merge of what ranks see of them."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.attention.partial import PartialAttention, Scoring
from megakv.cache.layer import LayerMapping
from megakv.cache.ragged import RaggedStore
from megakv.cache.shared_heads import SharedHeadsStore
from megakv.cache.shares import BLOCK, PERIOD, Copies, interleaved, owners, shares_of_rank
from megakv.cache.store import KVStore
from megakv.costmodel.stored_rows import page_bytes
from megakv.offload.config import OffloadConfig
from megakv.offload.host_memory import HostTier
from megakv.offload.link import EmulatedLink
from megakv.offload.pages import PagePool
from megakv.offload.residents import ResidentBudget
from megakv.offload.shared_tiers import SharedTiers
from megakv.offload.store import TieredStore
from megakv.offload.turn_store import CompressedStore
from tests.mappings import mapping_of, random_ranks

DIM, VALUE_DIM, GROUP = 16, 24, 2


def test_things_are_shared_out_evenly() -> None:
    for counts in ([32], [31, 1], [16, 16], [0, 5, 27], [11, 11, 10]):
        found = interleaved(counts, sum(counts))
        assert np.bincount(found, minlength=len(counts)).tolist() == counts
        for place in range(1, len(found) + 1):
            given = np.bincount(found[:place], minlength=len(counts))
            assert (abs(given - np.array(counts) * place / len(found)) <= 1).all()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_copies_divide_any_batch_by_their_shares(size: int) -> None:
    ranks = random_ranks(6, size)
    even = LayerMapping.even(ranks)
    uneven = even.with_shares(
        [np.random.default_rng(random.randint(0, 99)).random(len(held)).tolist() for held in ranks]
    )
    for mapping in (even, uneven):
        found = owners(mapping, random.randint(0, 9))
        for head, held in enumerate(mapping.ranks):
            for batch in (1, 2, 3, 5, 24):
                served = [int((found[head][:batch] == rank).sum()) for rank in held]
                assert sum(served) == batch
                assert np.abs(np.array(served) - np.array(mapping.shares[head]) * batch).max() <= 1


def test_what_is_left_over_of_a_batch_is_not_on_one_rank() -> None:
    mapping = LayerMapping.even([[0, 1], [1], [0, 1], [0], [0, 1], [0, 1]])
    for layer in range(3):
        found = owners(mapping, layer)
        served = np.bincount([rank for head in (0, 2, 4, 5) for rank in found[head][:5]], minlength=2)
        assert served.tolist() == [10, 10]
    assert owners(mapping, 0)[0][0] != owners(mapping, 1)[0][0]


class Ranks:
    """The stores of all ranks of one layer, with what they were given."""

    def __init__(
        self, kv_heads: int, size: int, batch: int, *, ragged: bool, copies: Copies = "tokens", engine: Any = None
    ):
        self.kv_heads, self.size, self.batch, self.copies = kv_heads, size, batch, copies
        self.mapping = LayerMapping.even(random_ranks(kv_heads, size))
        self.prompts = np.arange(batch) + random.randint(0, 9)
        self.owners = owners(self.mapping, 1) if copies == "batch" else None
        whole = mapping_of([list(map(list, self.mapping.ranks))], size).head_map(kv_heads * GROUP)
        self.heads = [list(whole.shard(0, rank).kv_heads) for rank in range(size)]
        self.stores: list[KVStore] = []
        self.shares = []
        for rank in range(size):
            shares = shares_of_rank(self.mapping, rank, size, layer=1, copies=copies)
            self.shares.append(shares)
            if engine is not None:
                tiers = SharedTiers(0, self.prompts, shares, engine)
                self.stores.append(CompressedStore(batch, tiers) if ragged else tiers)
                continue
            store = SharedHeadsStore(self.prompts, shares)
            self.stores.append(RaggedStore(batch, store) if ragged else store)
        self.k = [torch.empty(kv_heads, 0, DIM) for _ in range(batch)]
        self.v = [torch.empty(kv_heads, 0, VALUE_DIM) for _ in range(batch)]
        self.kept = [torch.empty(kv_heads, 0, dtype=torch.bool) for _ in range(batch)]

    def append(self, rows: list[int], *, complete: bool = False) -> None:
        for store in self.stores:
            store.begin(complete=complete)
        new = [[torch.randn(self.kv_heads, count, dim) for dim in (DIM, VALUE_DIM)] for count in rows]
        single = set(rows) == {1}
        for heads, store in zip(self.heads, self.stores, strict=True) if single else ():
            store.append_each(range(len(rows)), *(torch.cat(each, dim=1)[heads] for each in zip(*new, strict=True)))
        for sequence, (count, (k, v)) in enumerate(zip(rows, new, strict=True)):
            if count:
                for rank, store in enumerate(() if single else self.stores):
                    store.append(sequence, k[self.heads[rank]], v[self.heads[rank]])
                self.k[sequence] = torch.cat([self.k[sequence], k], dim=1)
                self.v[sequence] = torch.cat([self.v[sequence], v], dim=1)
                kept = torch.ones(self.kv_heads, count, dtype=torch.bool)
                self.kept[sequence] = torch.cat([self.kept[sequence], kept], dim=1)

    def finish(self) -> None:
        for store in self.stores:
            store.finish()

    def compress(self, sequence: int, count: int) -> None:
        """Keep some of the last tokens; the replicas of a head divide them at random places, or one has all."""
        keep = torch.rand(self.kv_heads, count) < torch.rand(self.kv_heads, 1)
        owner = torch.empty(self.kv_heads, count, dtype=torch.long)
        for head, ranks in enumerate(self.mapping.ranks):
            owner[head] = torch.tensor(ranks)[torch.randint(len(ranks), (count,))]
            if self.owners is not None:
                owner[head] = int(self.owners[head][self.prompts[sequence]])
        for rank, store in enumerate(self.stores):
            store.compress(sequence, (keep & (owner == rank))[self.heads[rank]])
        self.kept[sequence][:, -count:] = keep

    def crop(self, lengths: list[int]) -> None:
        for store in self.stores:
            for sequence, length in enumerate(lengths):
                store.crop(sequence, length)
        for sequence, length in enumerate(lengths):
            self.k[sequence], self.v[sequence] = self.k[sequence][:, :length], self.v[sequence][:, :length]
            self.kept[sequence] = self.kept[sequence][:, :length]

    def reorder(self, index: list[int]) -> None:
        for store in self.stores:
            store.reorder(index)
        self.k, self.v = [self.k[source] for source in index], [self.v[source] for source in index]
        self.kept = [self.kept[source].clone() for source in index]
        self.prompts = self.prompts[index]

    def held(self, stores: list, sequence: int) -> list[int]:
        """Tokens of each head on all ranks."""
        found = np.zeros(self.kv_heads, dtype=np.int64)
        for heads, store in zip(self.heads, stores, strict=True):
            found[heads] += store.kept(sequence)
        return found.tolist()

    def check(self, queries: int) -> None:
        """All ranks together attend as one does to the tokens that are kept, and hold each of them once."""
        scoring = Scoring(0.3, alibi_slopes=torch.rand(self.kv_heads * GROUP))
        for sequence in range(self.batch):
            total = self.k[sequence].shape[1]
            if not total:
                continue
            first = max(0, total - queries)
            q = torch.randn(self.kv_heads * GROUP, total - first, DIM)
            slots = np.arange(total) * 3
            outs, lses = [], []
            for rank, store in enumerate(self.stores):
                own = [head * GROUP + query for head in self.heads[rank] for query in range(GROUP)]
                assert scoring.alibi_slopes is not None
                local = Scoring(0.3, alibi_slopes=scoring.alibi_slopes[own])
                partial = PartialAttention(q[own], slots[first:], local, VALUE_DIM)
                for part in store.parts(sequence, slots, slots - 5):
                    part.add_to(partial)
                out = torch.zeros(q.shape[0], q.shape[1], VALUE_DIM)
                lse = torch.full(q.shape[:2], -torch.inf)
                out[own], lse[own] = partial.out, partial.lse
                outs.append(out)
                lses.append(lse)
            whole = torch.stack(lses).logsumexp(0)
            weights = [(lse - whole).exp().nan_to_num(0.0)[..., None] for lse in lses]
            if self.copies == "batch":
                assert all(bool(((weight == 0) | (weight == 1)).all()) for weight in weights)
                merged = sum(outs)
            else:
                merged = sum(out * weight for out, weight in zip(outs, weights, strict=True))
            assert torch.allclose(merged, self.reference(sequence, q, slots, first, scoring), atol=1e-5, rtol=0)

    def reference(self, sequence: int, q: Tensor, slots: np.ndarray, first: int, scoring: Scoring) -> Tensor:
        assert scoring.alibi_slopes is not None
        k, v = (x[sequence].repeat_interleave(GROUP, 0).double() for x in (self.k, self.v))
        scores = torch.einsum("hld,hsd->hls", q.double(), k) * scoring.scale
        distance = torch.from_numpy(slots[None] - 5 - slots[first:, None])
        scores = scores + scoring.alibi_slopes.double()[:, None, None] * distance
        visible = (
            torch.from_numpy(slots[None] <= slots[first:, None])
            & self.kept[sequence].repeat_interleave(GROUP, 0)[:, None]
        )
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
        return (weights @ v).float()


@pytest.fixture
def engine() -> Iterator[SimpleNamespace]:
    """What stores ask of an engine that offloads."""
    link, memory = EmulatedLink(), HostTier(8 << 20, pin=False)
    pool, expected = PagePool([memory], 1 << 10), list[TieredStore]()
    config = OffloadConfig(enabled=True, method="stream")
    yield SimpleNamespace(
        config=config,
        link=link,
        pool=pool,
        device=torch.device("cpu"),
        residents=ResidentBudget(1000, 1),
        expect=expected.append,
    )
    assert expected
    link.close()
    memory.close()


@pytest.mark.drawn(12)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("copies", get_args(Copies))
@pytest.mark.parametrize("offloaded", [False, True])
def test_ranks_together_hold_and_see_all_tokens_once(
    ragged: bool, size: int, copies: Copies, offloaded: bool, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue("engine") if offloaded else None
    ranks = Ranks(random.choice((1, 2, 5)), size, 3, ragged=ragged, copies=copies, engine=engine)
    lengths = [random.randint(100, 400), 1, 0]
    ranks.append(lengths)
    ranks.check(max(lengths))
    if ragged:
        ranks.compress(0, lengths[0])
    ranks.finish()
    for step in range(2 * BLOCK + 3):
        ranks.append([1, 1, 1])
        if step % 9 == 0:
            ranks.check(1)
    twins, forked = [store.fork() for store in ranks.stores], ranks.kept[0].sum(1).tolist()
    ranks.append([30, 0, 2])
    ranks.check(30)
    ranks.finish()
    ranks.check(1)
    for sequence in range(3):
        assert ranks.held(ranks.stores, sequence) == ranks.kept[sequence].sum(1).tolist()
    counts = [tokens.shape[1] for tokens in ranks.k]
    ranks.crop([max(count - random.randint(0, 40), 0) for count in counts])
    ranks.append([1, 1, 1])
    ranks.check(1)
    ranks.reorder([1, 0, 0])
    ranks.append([1, 1, 1])
    ranks.check(1)
    assert ranks.held(twins, 0) == forked


def test_a_pass_over_an_empty_cache_may_be_attended_to_whole() -> None:
    """Where the method sends keys and values to other ranks, they are all there."""
    ranks = Ranks(4, 2, 1, ragged=False)
    ranks.append([50], complete=True)
    for heads, store in zip(ranks.heads, ranks.stores, strict=True):
        (part,) = store.parts(0, np.arange(50), np.arange(50))
        assert torch.equal(part.k_KSD, ranks.k[0][heads])
    ranks.finish()
    ranks.check(50)


def test_memory_is_that_of_the_own_tokens() -> None:
    ranks = Ranks(6, 4, 1, ragged=False)
    length = PERIOD * BLOCK * 3
    ranks.append([length])
    ranks.finish()
    held = sum(store.nbytes() for store in ranks.stores)
    # Beside keys and values, the row of each token of a shared head.
    assert held <= 6 * length * ((DIM + VALUE_DIM) * 4 + 8) * 1.04


def test_rows_of_heads_without_tokens_have_a_width(engine: SimpleNamespace) -> None:
    ranks = Ranks(3, 3, 2, ragged=False, engine=engine)
    ranks.append([1, 1])
    for store in ranks.stores:
        assert isinstance(store, SharedTiers)
        assert [strip.store.row_width for strip in store.strips[1:]] == [DIM + VALUE_DIM] * (len(store.strips) - 1)


def test_room_is_counted_as_tiers_take_it(engine: SimpleNamespace) -> None:
    ranks = Ranks(5, 3, 2, ragged=False, engine=engine)
    lengths = [random.randint(1, 1500), random.randint(1, 40)]
    ranks.append(lengths)
    ranks.finish()
    for store, shares in zip(ranks.stores, ranks.shares, strict=True):
        assert isinstance(store, SharedTiers)
        counted = store.tier.bytes_for(lengths, shares, ranks.prompts.tolist())
        # How much of a begun period is another rank's is not looked at.
        begun = page_bytes(PERIOD * BLOCK, store.tier.body_row_bytes, engine.pool.page_bytes)
        taken = sum(strip.store.nbytes() for strip in store.strips)
        assert taken <= counted <= taken + len(lengths) * len(shares.patterns) * begun
        assert len(shares.patterns) or taken == counted


def test_heads_of_one_rank_alone_come_first() -> None:
    mapping = mapping_of([[[0, 1], [0], [1, 0], [1]]], 2)
    head_map = mapping.head_map(8)
    assert [head_map.shard(0, rank).kv_heads for rank in range(2)] == [(1, 0, 2), (3, 0, 2)]
    assert head_map.shard(0, 1).query_heads == (6, 7, 0, 1, 4, 5)
    assert head_map.whole_copies(0) == {0: (0, 1), 2: (4, 5)}
