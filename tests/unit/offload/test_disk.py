"""A disk that fails while tokens are generated: rows that it refuses stay in memory, and nothing generated is lost."""

import copy
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megakv.errors import MegaKVError
from megakv.offload.disk import DiskTier
from tests.unit.offload.test_exactness import generate, plain_model

PAGE = 8 << 10


@contextmanager
def files_at_most(nbytes: int) -> Iterator[None]:
    """No file of this process may be written to behind a byte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_the_disk_refuses_stays_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(10000, tmp_path)
    generator = torch.Generator().manual_seed(4)
    shadow = torch.zeros(2500)
    for step in range(60):
        first = int(torch.randint(0, 490, (1,), generator=generator)) * 5
        rows = torch.randn(int(torch.randint(1, 11, (1,), generator=generator)), 5, generator=generator)
        rows = rows[: (2500 - first) // 5].contiguous()
        with files_at_most(3000 if step >= 20 else 10000):
            tier.rows(4 * first, len(rows), 5, torch.float32).write_from(rows)
        shadow[first : first + rows.numel()] = rows.flatten()
        at = int(torch.randint(0, 400, (1,), generator=generator)) * 5
        found = torch.empty(100, 5)
        tier.rows(4 * at, 100, 5, torch.float32).read_into(found)
        assert torch.equal(found.flatten(), shadow[at : at + 500])
    assert 0 < tier.rescued <= 10000
    assert caplog.text.count("stays in host memory from now on") == 1
    tier.close()


@pytest.mark.parametrize("method", ["stream", "auto"])
def test_a_full_disk_costs_no_token(
    method: str, offloaded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_model("opt")
    ids = torch.randint(3, 190, (2, 30), generator=torch.Generator().manual_seed(3))
    expected = generate(model, ids, torch.ones_like(ids), max_new_tokens=25)
    engine = offloaded(
        copy.deepcopy(model), method=method, host_gb=2 * PAGE / (1 << 30), disk_gb=0.01, disk_path=str(tmp_path)
    )
    with files_at_most(5 * PAGE + 1000):
        assert torch.equal(generate(engine, ids, torch.ones_like(ids), max_new_tokens=25), expected)
    (disk,) = (tier for tier in engine._offloader.pool.tiers if isinstance(tier, DiskTier))
    assert disk.rescued > 0 and "generation goes on as long as that lasts" in caplog.text


def test_a_lost_file_ends_with_what_was_generated(offloaded: Any, tmp_path: Path) -> None:
    model = plain_model("opt")
    engine = offloaded(
        copy.deepcopy(model), method="stream", host_gb=2 * PAGE / (1 << 30), disk_gb=0.01, disk_path=str(tmp_path)
    )
    turn = torch.randint(3, 190, (2, 30), generator=torch.Generator().manual_seed(3))
    expected = generate(model, turn, torch.ones_like(turn), max_new_tokens=25)
    session = engine.session()
    (disk,) = (tier for tier in engine._offloader.pool.tiers if isinstance(tier, DiskTier))

    def lose_file(input_ids: Any, scores: Any, **_: Any) -> Any:
        if input_ids.shape[1] == 40:
            gone = os.open(os.devnull, os.O_RDWR)
            os.dup2(gone, disk._file.fileno())
            os.close(gone)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with pytest.raises(MegaKVError, match=r"a transfer of .* failed: the file in megakv.offload.disk_path") as caught:
        session.generate(turn, max_new_tokens=25, do_sample=False, pad_token_id=0, stopping_criteria=[lose_file])
    found = caught.value.sequences
    assert found is not None and found.shape[1] >= 40 and torch.equal(found, expected[:, : found.shape[1]])
