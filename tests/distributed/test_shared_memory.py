"""DeepSpeed's shared-memory all-reduce, which ignores its group: used where TP is the whole world, and only there."""

import importlib
import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "shared_memory.py"


def op_can_be_built() -> bool:
    """Whether DeepSpeed takes this machine for one where its op compiles."""
    return bool(importlib.import_module("deepspeed.ops").__compatible_ops__.get("deepspeed_shm_comm", False))


@pytest.mark.parametrize(
    ("meshes", "local_size"),
    [
        ("1x2,2x1", "2"),
        # The op stands when the second mesh comes, and would silently sum over all four ranks.
        ("1x4,2x2", "4"),
        ("2x2,1x4", "4"),
        # Ranks on other hosts, or a launcher that says nothing: the op would crash.
        ("1x2", "1"),
        ("1x2", "0"),
    ],
)
def test_shared_memory_serves_the_whole_world_only(meshes: str, local_size: str, tmp_path: Path) -> None:
    first = meshes.split(",")[0]
    cp, tp = (int(part) for part in first.split("x"))
    out = tmp_path / "out.json"
    environment = {"LOCAL_SIZE": local_size}
    run_ranks(SCRIPT, out, tmp_path, meshes, ranks=cp * tp, timeout=200, env=environment).check()
    results = json.loads(out.read_text())
    assert [result["mesh"] for result in results] == meshes.split(",")
    for result in results:
        assert result["equal"] == [True] * 3, result
        # The op starts with the process group or never: a mesh that comes later finds what the first one wanted.
        alone = first.startswith("1x") and result["mesh"].startswith("1x")
        expected = alone and int(local_size) == cp * tp and op_can_be_built()
        assert result["shared_memory"] is expected, result
        assert (result["calls"] > 0) is expected, result
        engine, single = result["errors"]
        assert 0 < engine <= 1.1 * single, result
        # Nothing stays in shared memory after the run; not even names are there during it.
        assert result["files"] == []
