"""Memory of a prompt that is read in chunks, each of which is kept: few pieces, and little that nobody counts."""

import random

import pytest
import torch

from megakv.cache.segments import MOST_SEGMENTS, SegmentedRows
from megakv.serving.worker import BLOCK_SHARE, blocks


@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("chunk", [64, 120, 250, 700, 1100, 1300, 2048])
def test_a_prompt_takes_little_more_memory_than_it_has_tokens(chunk: int, layer: int) -> None:
    """Whenever it ends: a client may leave."""
    prompt = random.randint(4000, 12_000)
    like = torch.empty(1, 0, 8), torch.empty(1, 0, 8)
    rows, kept = SegmentedRows(like, 16), list[torch.Tensor]()
    while rows.length < prompt:
        before, new = rows.length, min(chunk, prompt - rows.length)
        rows.expect(min(prompt, before + blocks(before, new, 6)[layer]))
        for place in rows.extend(new):
            place[:] = torch.arange(before, before + new)[None, :, None]
        kept += [keys for keys, _ in rows.share(before, before + new)]
        assert len(rows.segments()) <= MOST_SEGMENTS + 1
        taken = {keys.untyped_storage().data_ptr(): keys.untyped_storage().nbytes() for keys in kept}
        written = 32 * rows.length
        assert sum(taken.values()) <= (1 + 1 / BLOCK_SHARE) * written + 32 * (chunk + 16)
    found = torch.cat([keys for keys, _ in rows.segments()], dim=1)[0, :, 0]
    assert torch.equal(found, torch.arange(prompt, dtype=torch.float32))
