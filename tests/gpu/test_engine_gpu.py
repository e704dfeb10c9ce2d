"""An engine on one GPU, started by the deepspeed launcher in an NCCL world of one."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_engine_equals_the_plain_model(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    script, env = Path(__file__).parent / "ranks" / "engine.py", {"DS_ACCELERATOR": "cuda"}
    run_ranks(script, out, ranks=1, timeout=300, launcher="deepspeed", env=env).check()
    found = json.loads(out.read_text())
    assert "nccl" in found["backend"] and found["sum"] == [2.5, 2.5, 2.5]
    exact, half = found["torch.float32"], found["torch.bfloat16"]
    assert exact["device"] == half["device"] == "cuda" and exact["peak_bytes"] > 0
    assert max(exact["errors"]) < 1e-4 and all(exact["tokens_equal"])
    # Both are off the exact logits by bfloat16's rounding; ties of random logits may fall differently.
    assert max(half["errors"]) < 3e-2
