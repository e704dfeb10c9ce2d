"""Steps of tensor-parallel ranks as CUDA graphs, with stand-ins for CUDA: captured by all of them, or by none."""

import json
from pathlib import Path

from tests.distributed.launch import run_ranks


def test_ranks_capture_together(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_ranks(Path(__file__).parent / "ranks" / "step_graphs.py", out, ranks=2, timeout=240).check()
    for rank in range(2):
        found = json.loads(Path(f"{out}.{rank}").read_text())
        assert all(call["same"] for call in found["calls"]), found
        # The prompt's pass is none; of the first call another step shows how layers attend.
        assert [call["replays"] for call in found["calls"]] == [6, 7, 0, 8], found
        assert found["graphs"] == 2
