"""Copies of a layer's rows, found together: what comes back is what went, over any history, as sequence by sequence."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megakv.cache.ragged_body import RaggedBody
from megakv.offload.bodies import TieredBody
from megakv.offload.config import OffloadConfig
from megakv.offload.host_memory import HostTier
from megakv.offload.layer_rows import LayerRows
from megakv.offload.link import EmulatedLink
from megakv.offload.paged_rows import PagedRows
from megakv.offload.pages import PagePool
from megakv.offload.prefetch import _bring_bodies, _bring_rows
from megakv.offload.residents import ResidentBudget
from megakv.offload.staging import StagedLayer, StagingBuffer
from megakv.offload.store import TieredStore
from tests.unit.offload.test_pages import WIDTH, make_pool, read

SEQUENCES = 5


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_equal_plain_tensors(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    torch.manual_seed(seed)
    pool, link = make_pool(12, 300, tmp_path), EmulatedLink()
    # Pages with room left over at their end cannot be joined.
    width = generator.choice([WIDTH, 4])
    layer = LayerRows(PagedRows(pool) for _ in range(SEQUENCES))
    expected = [torch.empty(0, width) for _ in range(SEQUENCES)]
    gone = [0] * SEQUENCES
    for _ in range(80):
        match generator.choice(["add", "add", "step", "reorder", "truncate", "forget"]):
            case "add" | "step" as action:
                some = sorted(generator.sample(range(SEQUENCES), generator.randrange(1, SEQUENCES + 1)))
                block = torch.randn(60, width)
                counts = [1 if action == "step" else generator.randrange(0, 12) for _ in some]
                firsts = [generator.randrange(0, 60 - count) for count in counts]
                spans = [slice(first, first + count) for first, count in zip(firsts, counts, strict=True)]
                link.start("out", layer.extend_each(some, block, spans))
                for sequence, span in zip(some, spans, strict=True):
                    expected[sequence] = torch.cat([expected[sequence], block[span]])
            case "reorder":
                index = [generator.randrange(SEQUENCES) for _ in range(SEQUENCES)]
                layer = layer.fork(index)
                expected, gone = [expected[source] for source in index], [gone[source] for source in index]
            case "truncate":
                sequence = generator.randrange(SEQUENCES)
                length = generator.randrange(gone[sequence], len(expected[sequence]) + 1)
                layer[sequence].truncate(length)
                expected[sequence] = expected[sequence][:length]
            case "forget":
                sequence = generator.randrange(SEQUENCES)
                gone[sequence] = generator.randrange(gone[sequence], len(expected[sequence]) + 1)
                layer[sequence].forget(gone[sequence])
        # Any runs, several of one sequence too, to rows that do not touch each other.
        runs, wanted, row = [], torch.zeros(200, width), 0
        for sequence in generator.choices(range(SEQUENCES), k=generator.randrange(0, 7)):
            first = generator.randrange(gone[sequence], len(expected[sequence]) + 1)
            count = min(generator.randrange(0, 25), len(expected[sequence]) - first)
            row += generator.randrange(0, 3)
            runs.append((sequence, first, count, row))
            wanted[row : row + count] = expected[sequence][first : first + count]
            row += count
            paged = layer[sequence]
            if paged.known:
                assert torch.equal(read(link, paged, first, count), expected[sequence][first : first + count])
        found = torch.zeros(200, width)
        if moves := layer.moves(found, runs):
            link.start("in", moves).wait()
        assert torch.equal(found, wanted)
    del layer, paged
    assert pool.used() == {"host": 0, "disk": 0}
    link.close()


def test_a_prompt_s_rows_move_in_one_copy_for_each_sequence() -> None:
    pool = make_pool(60)
    layer = LayerRows(PagedRows(pool) for _ in range(3))
    block = torch.randn(90, WIDTH)
    layer.extend_each(range(3), block, [slice(30 * each, 30 * each + 30) for each in range(3)])
    (move,) = layer.moves(block, [(each, 2, 20, 20 * each) for each in range(3)])
    assert move.sizes.tolist() == [20 * WIDTH * 4] * 3 and move.in_memory
    assert len(move.places) == 3 * len(layer[0].pages_of(2, 20)) == 3 * 4
    assert layer.moves(block, []) == layer.moves(block, [(0, 5, 0, 0)]) == []


def test_a_block_of_another_type_is_refused() -> None:
    layer = LayerRows([PagedRows(make_pool(4))])
    layer.extend_each([0], torch.randn(3, WIDTH), [slice(0, 3)])
    for block in (torch.randn(3, WIDTH).bfloat16(), torch.randn(3, WIDTH + 1)):
        with pytest.raises(AssertionError):
            layer.moves(block, [(0, 0, 3, 0)])


@pytest.mark.parametrize("own_heads", [0, 2])
def test_packed_bodies_come_where_a_rank_has_no_head_of_its_own(own_heads: int) -> None:
    """Heads that other ranks hold too are bodies' as well: then the layer's rows have no elements."""
    link, cpu = EmulatedLink(), torch.device("cpu")
    config = OffloadConfig(enabled=True, host_gb=1, kv_bits=8, kv_group=4)
    engine: Any = SimpleNamespace(
        config=config,
        link=link,
        pool=PagePool([HostTier(1 << 20)], 1 << 13),
        device=cpu,
        residents=ResidentBudget(0, 1),
    )
    store = TieredStore(0, 1, engine)
    store.set_format(torch.empty(own_heads, 0, 16), torch.empty(own_heads, 0, 16))
    body = RaggedBody.kept(torch.randn(2, 50, 16), torch.randn(2, 50, 16), torch.rand(2, 50) < 0.5, np.arange(50))
    assert body is not None
    tiered, buffer = TieredBody(body, 0, engine, store.body_quantiser), StagingBuffer(cpu)
    rows = buffer.take("rows 0", 4, store.row_width, torch.float32)
    staged = StagedLayer(store, 0, range(1), buffer, rows, [0], [0], [4], [0], [0], [0])
    staged.streamed = link.start("in", [*_bring_bodies(staged, [tiered]), *_bring_rows(store, 0, staged)])
    record: Any = SimpleNamespace(clock=SimpleNamespace(mark=lambda: 0), arrived=lambda begun: None, attending=None)
    staged.record = record
    staged.await_streamed()
    assert (staged.bodies[tiered].k_nD - body.k_nD).abs().max() < 0.02
    link.close()
