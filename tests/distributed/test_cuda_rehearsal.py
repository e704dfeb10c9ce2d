"""The CUDA path on a machine without a GPU: tensors meet on one device, and a step of decoding waits for it once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None or torch.cuda.is_available(), reason="needs a C++ compiler, and no GPU"
)


def rehearse(out: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = {
        **os.environ, "DS_ACCELERATOR": "cuda", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "PYTHONPATH": str(ROOT / "tests"),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "scripts" / "cuda_rehearsal.py"), "--json", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert out.exists(), done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    for row in rows:
        assert not row["error"], (row["path"], row["error"])
        assert row["wrong_devices"] == 0 and row["waits_per_step"] <= row["most"], row
        # That of its own: whether all rows have stopped.
        assert row["waits_of_transformers"] <= 1, row
        # In two layers a call for all kept tokens, and one for those behind them, of three sequences.
        if row["path"].startswith("compression") and "CP" not in row["path"]:
            assert row["varlen_calls"] == 4, row
    return rows


def test_tensor_parallel_ranks_capture_their_sums(tmp_path: Path) -> None:
    """Behind attention and behind the feed-forward of two layers."""
    rows = rehearse(tmp_path / "rehearsal.json", "--only", "TP")
    (row,) = (row for row in rows if row["path"] == "TP")
    assert len(row["captured"]) == 1 and row["collectives_captured"] == 4


@pytest.mark.full
def test_no_wrong_device_and_one_wait_for_each_token(tmp_path: Path) -> None:
    assert len(rehearse(tmp_path / "rehearsal.json")) > 30
