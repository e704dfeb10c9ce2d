"""A disk that fails while tokens are generated: rows that it refuses stay in memory, and nothing generated is lost."""

import copy
import errno
import gc
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakv.base.errors import MegaKVError
from megakv.distributed.compat import drop_stale_lock
from megakv.offload.disk import DiskTier
from megakv.offload.prices import LayerPrices, placed
from megakv.offload.rates import Rates
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
    assert tier._refused
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
    assert disk._refused and "generation goes on as long as that lasts" in caplog.text


def test_the_next_generation_has_the_memory_of_the_last(offloaded: Any, tmp_path: Path) -> None:
    """Without waiting for the garbage collector: it would lie on disk otherwise, where there is room."""
    model = plain_model("opt")
    ids = torch.randint(3, 190, (2, 30), generator=torch.Generator().manual_seed(5))
    budgets = {"host_gb": 6 * PAGE / (1 << 30), "disk_gb": 0.01, "disk_path": str(tmp_path)}
    engine = offloaded(copy.deepcopy(model), method="stream", **budgets)
    gc.disable()
    try:
        used = []
        for _ in range(3):
            generate(engine, ids, torch.ones_like(ids), max_new_tokens=6)
            used.append(engine._offloader.pool.used())
    finally:
        gc.enable()
    assert used[0]["host"] and used[0]["disk"] and used == 3 * used[:1]


@pytest.mark.parametrize(("host_s", "recompute_s", "kept"), [(1e-3, 5.0, False), (1e3, 1.3, True)])
def test_activations_have_only_memory_that_the_host_has_no_better_use_for(
    host_s: float,
    recompute_s: float,
    kept: bool,
    offloaded: Any,
    fixed_costs: LayerPrices,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    costs, measured = replace(fixed_costs, host_attend_s=host_s, recompute_s=recompute_s), Rates.prices

    def layer(self: Rates, *args: Any, **options: Any) -> LayerPrices:
        measured(self, *args, **options)
        return costs

    monkeypatch.setattr(Rates, "prices", layer)
    model = plain_model("opt")
    ids = torch.randint(3, 190, (2, 30), generator=torch.Generator().manual_seed(6))
    expected = generate(model, ids, torch.ones_like(ids), max_new_tokens=6)
    config = model.config
    cache = 4 * 2 * config.hidden_size * config.num_hidden_layers * 2 * 36
    engine = offloaded(
        copy.deepcopy(model),
        host_gb=0.75 * cache / (1 << 30), disk_gb=0.01, disk_path=str(tmp_path), page_kib=1,
    )  # fmt: skip
    for with_inputs in (True, kept):
        assert torch.equal(generate(engine, ids, torch.ones_like(ids), max_new_tokens=6), expected)
        store = engine._offloader._cache.store(0)
        assert all(count > 0 for count in store.with_inputs()) == with_inputs
        share = 0.75 * cache / config.num_hidden_layers
        placements = placed(store.lengths(), share, row_bytes=store.row_bytes, input_bytes=store.input_bytes)
        assert sum(store.in_memory()) == pytest.approx(sum(placement.rows_in_memory for placement in placements), abs=8)
        # It would hold its rows.
        del store


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


def test_the_lock_of_a_killed_build_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert drop_stale_lock("some_op") is None
    lock = tmp_path / "some_op" / "lock"
    lock.touch()
    # One that a process works beside is waited for, however old it is.
    os.utime(lock, (0, 0))
    with subprocess.Popen(["sleep", "60"], cwd=lock.parent) as builder:
        assert drop_stale_lock("some_op") == lock and lock.exists()
        builder.kill()
    assert drop_stale_lock("some_op") is None
    assert not lock.exists() and f"removed {lock}, left by a build that was killed" in caplog.text
    # A fresh one is given time.
    monkeypatch.setattr("megakv.distributed.compat.LOCK_S", 1.0)
    lock.touch()
    begun = time.monotonic()
    assert drop_stale_lock("some_op") is None and time.monotonic() - begun >= 0.5


def test_a_write_beside_a_refused_one_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's row of the same block is refused while this one is on its way to the file."""
    tier = DiskTier(1 << 20, tmp_path)
    write, begun = os.pwritev, []

    def pwritev(file: int, buffers: Any, offset: int) -> int:
        begun.append(offset)
        if len(begun) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        tier.write(64, memoryview(b"b" * 64))
        return write(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    tier.write(0, memoryview(b"a" * 64))
    found = bytearray(128)
    tier.read(0, memoryview(found))
    assert begun == [0, 64] and found == b"a" * 64 + b"b" * 64
    tier.close()


def test_who_has_no_cached_tokens_learns_nothing() -> None:
    """A rank may hold none in its first steps of decoding: nothing was measured there."""
    rates: Any = Rates(SimpleNamespace())  # type: ignore[arg-type]
    rates.learn(SimpleNamespace(usual=True, profiled=False), layers=2)
    assert rates.profile is None and not rates["device_s"]


def test_a_disk_that_is_gone_costs_no_row_that_it_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file far larger than memory, which can be neither written nor read any more."""

    def gone(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    tier, rows = DiskTier(1 << 45, tmp_path), torch.randn(10, 5)
    monkeypatch.setattr(os, "pwritev", gone)
    monkeypatch.setattr(os, "preadv", gone)
    place, found = tier.rows((1 << 44) + 12, 10, 5, torch.float32), torch.zeros(10, 5)
    place.write_from(rows)
    place.read_into(found)
    assert found.equal(rows)
    with pytest.raises(OSError, match="Input/output"):
        tier.rows(0, 10, 5, torch.float32).read_into(found)
    tier.close()
