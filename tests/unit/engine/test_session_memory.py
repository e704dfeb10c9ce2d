"""Memory that saving a session takes, and reading one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megakv
from megakv.cache.cache import ShardedCache
from megakv.cache.saved_tokens import FORMAT
from megakv.cache.shared_heads import SharedHeadsStore
from megakv.cache.shares import PERIOD, HeadShares, TokenShares
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import TokenBlock
from megakv.engine.session_files import HeadsHere, SessionMeta, read_cache, write_shard
from tests.unit.engine.test_session_files import small_model

MIB = 1 << 20
LAYERS, TOKENS, HEADS, DIM = 8, 8192, 4, 64
LAYER_TENSOR = HEADS * TOKENS * DIM * 4


def fill(cache: ShardedCache, *, compressed: bool = False) -> int:
    """Put one sequence of random keys and values into an empty cache; returns their bytes."""
    slots = np.arange(TOKENS)
    cache.begin(balanced(TokenBlock(np.zeros_like(slots), slots, slots, 1), 1), 1)
    for layer in range(LAYERS):
        store: Any = cache.store(layer)
        store.append(0, *(torch.randn(HEADS, TOKENS, DIM) for _ in range(2)))
        if compressed:
            # Half of what there is, and all of it for the first head.
            keep = torch.rand(HEADS, TOKENS) < 0.5
            keep[0] = True
            store.compress(0, keep)
        store.finish()
    cache.commit(TOKENS, compressed=(0,) if compressed else ())
    return cache.nbytes()


def peak_growth(action: Callable[[], Any]) -> int:
    """Bytes by which this process was larger at some moment of an action than before it."""

    def memory(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    action()
    return memory("VmHWM") - before


def halves(rank: int) -> HeadShares:
    """Two heads of a rank alone, and two of which it and another rank have every other block."""
    return TokenShares(2, (np.arange(PERIOD) % 2 == rank, np.arange(PERIOD) % 2 != rank))


@pytest.mark.parametrize("kind", ["dense", "ragged", "shared", "host", "disk"])
def test_memory_that_saving_takes(kind: str, alone: None, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Saving needs one layer of one sequence beside the cache, reading little more than the cache."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell a process how large it was")
    torch.randn(1)
    options: dict[str, Any] = {"compresses": kind == "ragged"}
    if kind == "shared":
        options["new_store"] = lambda layer, prompts: SharedHeadsStore(prompts, halves(0))
    caches: list[ShardedCache] = []
    if kind in ("host", "disk"):
        settings = {"host_gb": 0.3} if kind == "host" else {"host_gb": 0.02, "disk_gb": 0.3, "disk_path": str(tmp_path)}
        section = {"offload": {"enabled": True, **settings}}
        engine = megakv.init_inference(small_model(num_hidden_layers=LAYERS), {"dtype": "fp32", "megakv": section})
        request.addfinalizer(engine.destroy)
        caches = [engine._offloader.new_cache(LAYERS) for _ in range(2)]
    else:
        caches = [ShardedCache(LAYERS, size=1, rank=0, **options) for _ in range(2)]
    held = fill(caches[0], compressed=kind == "ragged")
    folder = tmp_path / "data"
    folder.mkdir()

    def save() -> None:
        (folder / "cp00000_tp00000.safetensors").unlink(missing_ok=True)
        write_shard(folder, caches[0], 0, 1)

    # The first time also brings in code; what else goes on in the process can only add to it.
    save()
    growth = min(peak_growth(save) for _ in range(3))
    # Rows of a disk hold keys and values.
    assert growth <= (2 if kind == "disk" else 1) * LAYER_TENSOR + 4 * MIB < held / 2
    compressed = [list(span) for span in caches[0].compressed]
    heads, tp = [[list(range(HEADS))]] * LAYERS, 1
    if kind == "shared":
        # What this rank keeps of the heads that it shares is found among what both ranks had.
        heads, tp = [[[0, 1, 2, 3], [4, 5, 2, 3]]] * LAYERS, 2
        other = ShardedCache(LAYERS, size=1, rank=0, new_store=lambda _, prompts: SharedHeadsStore(prompts, halves(1)))
        fill(other)
        write_shard(folder, other, 1, 1)
        del other
    meta = SessionMeta(FORMAT, "", 1, tp, LAYERS, 1, TOKENS, "torch.float32", compressed, heads)
    growth = peak_growth(lambda: read_cache(folder, meta, caches[1], HeadsHere(heads, 0), torch.device("cpu")))
    assert growth <= held + 6 * LAYER_TENSOR + 4 * MIB
    write_again = tmp_path / "again"
    write_again.mkdir()
    write_shard(write_again, caches[1], 0, 1)
    name = "cp00000_tp00000.safetensors"
    assert (folder / name).read_bytes() == (write_again / name).read_bytes()
    shutil.rmtree(folder)
