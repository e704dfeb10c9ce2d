"""The sharded cache grows tightly, crops, reorders for beams and reports its bytes."""

import numpy as np
import pytest
import torch

from megakv.cache.cache import ShardedCache
from megakv.cache.dense import DenseStore
from megakv.cache.store import KVStore
from megakv.distributed.layouts import balanced, round_robin
from megakv.distributed.sharding import new_tokens


def rows(length: int, heads: int = 2, dim: int = 4) -> torch.Tensor:
    return torch.randn(heads, length, dim)


def tokens(batch: int, length: int, first: int = 0):
    mask = np.ones((batch, length), dtype=bool)
    return new_tokens(mask, np.broadcast_to(np.arange(first, first + length), mask.shape), first)


def test_a_store_has_few_verbs() -> None:
    """What all kinds have in common; what a kind adds is said at the top of its file."""
    verbs = [name for name, value in vars(KVStore).items() if callable(value) and not name.startswith("_")]
    assert len(verbs) <= 15, verbs


def test_appended_rows_come_back() -> None:
    store = DenseStore(2)
    pieces = [rows(n) for n in (100, 1, 1, 7, 1, 300, 2)]
    values = [torch.randn(2, piece.shape[1], 6) for piece in pieces]
    for key, value in zip(pieces, values, strict=True):
        store.append(1, key, value)
    keys, found = store.part(1)
    assert torch.equal(keys, torch.cat(pieces, dim=1))
    assert torch.equal(found, torch.cat(values, dim=1))


def test_first_append_is_exact_and_growth_is_small() -> None:
    store = DenseStore(1)
    store.append(0, rows(1000), rows(1000))
    assert store.nbytes() == 2 * 2 * 1000 * 4 * 4
    for _ in range(500):
        store.append(0, rows(1), rows(1))
    assert store.nbytes() <= 1.05 * 2 * 2 * 1500 * 4 * 4


def test_a_small_cut_needs_no_memory() -> None:
    """It may follow a failure for want of memory."""
    store = DenseStore(1)
    store.append(0, rows(1000), rows(1000))
    before = store.part(0)[0].data_ptr()
    store.crop(0, 600)
    assert store.part(0)[0].data_ptr() == before and store.rows(0) == 600
    store.crop(0, 100)
    assert store.nbytes() == 2 * 2 * 100 * 4 * 4


def test_appended_rows_do_not_alias_their_source() -> None:
    source = rows(5)
    store = DenseStore(1)
    store.append(0, source, source)
    source.zero_()
    assert store.part(0)[0].abs().sum() > 0


def test_reorder_copies_shared_rows() -> None:
    store = DenseStore(3)
    originals = [rows(4) for _ in range(3)]
    for index, original in enumerate(originals):
        store.append(index, original, original)
    store.reorder([2, 2, 0])
    for index, source in enumerate([2, 2, 0]):
        assert torch.equal(store.part(index)[0], originals[source])
    store.append(0, rows(1), rows(1))
    assert torch.equal(store.part(1)[0], originals[2])


def test_forks_share_memory_until_they_grow() -> None:
    store = DenseStore(1)
    store.append(0, rows(40), rows(40))
    twin = store.fork()
    before = store.part(0)[0].clone()
    assert twin.part(0)[0].data_ptr() == store.part(0)[0].data_ptr()
    mine, other = rows(1), rows(1)
    store.append(0, mine, mine)
    twin.append(0, other, other)
    assert torch.equal(store.part(0)[0], torch.cat([before, mine], dim=1))
    assert torch.equal(twin.part(0)[0], torch.cat([before, other], dim=1))
    twin.crop(0, 5)
    assert store.part(0)[0].shape[1] == 41


def grown(size: int, rank: int, batch: int) -> ShardedCache:
    cache = ShardedCache(2, size=size, rank=rank)
    first, second = balanced(tokens(batch, 21), size), round_robin(tokens(batch, 1, 21), size)
    for layout, slots in ((first, 21), (second, 22)):
        cache.begin(layout, batch)
        for layer in range(2):
            for sequence in range(batch):
                run = layout.stored[rank].run(sequence)
                if run.stop > run.start:
                    slot = torch.from_numpy(layout.stored[rank].slot[run]).float()
                    key = slot.view(1, -1, 1).expand(2, -1, 4).contiguous()
                    cache.store(layer).append(sequence, key, key)
        cache.commit(slots)
    return cache


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_rows_stay_in_step_with_the_table(size: int, rank: int) -> None:
    cache = grown(size, rank, 2)
    assert cache.get_seq_length() == 22
    assert cache.get_mask_sizes(1, 0) == (23, 0)
    for slots in (22, 20, 9, 0):
        cache.cut_back(slots)
        assert cache.length == slots
        for sequence in range(2):
            expected = cache.table.slots(rank, sequence)
            assert (expected < slots).all()
            if len(expected):
                keys, _ = cache.store(1).part(sequence)
                assert keys[0, :, 0].tolist() == expected.tolist()


def test_crop_takes_both_conventions_of_transformers() -> None:
    cache = grown(2, 0, 1)
    cache.crop(-2)
    assert cache.length == 20
    cache.crop(7)
    assert cache.length == 7


def test_batch_operations() -> None:
    cache = grown(2, 1, 2)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert cache.batch_size == 2
    cache.reorder_cache(torch.tensor([1, 1]))
    assert np.array_equal(cache.table.slots(1, 0), cache.table.slots(1, 1))


def test_what_every_rank_holds_follows_the_table() -> None:
    """Messages are made and read by it."""
    cache = grown(3, 0, 2)

    def check() -> None:
        ends = np.zeros(cache.table.batch, dtype=np.int64)
        for rank, block in enumerate(cache.table.tokens()):
            for sequence in range(cache.table.batch):
                run = block.run(sequence)
                assert np.array_equal(block.slot[run], cache.table.slots(rank, sequence))
                assert np.array_equal(block.position[run], cache.table.positions(rank, sequence))
                ends[sequence] = max(ends[sequence], 1 + block.position[run].max(initial=-1))
        assert np.array_equal(cache.table.next_positions(), ends)

    check()
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    check()
    for slots in (20, 9, 0):
        cache.cut_back(slots)
        check()


def test_another_batch_is_refused() -> None:
    cache = grown(2, 0, 2)
    with pytest.raises(ValueError, match="input_ids has 3 rows but the cache holds 2 sequences"):
        cache.begin(balanced(tokens(3, 4, 22), 2), 3)


def test_reserved_room_is_written_by_the_caller() -> None:
    store = DenseStore(2)
    first, second, third = (rows(n) for n in (7, 20, 2))
    for piece in (first, second):
        keys, values = store.reserve(1, piece.shape[1], piece[:, :0], piece[:, :0, :3])
        assert keys.shape == piece.shape and values.shape == (2, piece.shape[1], 3)
        keys[:], values[:] = piece, piece[..., :3]
    twin = store.fork()
    twin.reserve(1, 2, third, third[..., :3])[0][:] = third
    assert torch.equal(store.part(1)[0], torch.cat([first, second], dim=1))
    assert torch.equal(twin.part(1)[0], torch.cat([first, second, third], dim=1))
    assert torch.equal(store.part(1)[1], torch.cat([first, second], dim=1)[..., :3])
    store.crop(1, 6)
    assert torch.equal(store.part(1)[0], first[:, :6])
