"""benchmarks/offload.py on a CUDA GPU, over its own link."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.benchmarks.running import BENCHMARKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SMALL = ["--shapes", "opt-6.7b", "--layers", "2", "--batch", "4", "--group", "2", "--prompt", "256", "--new", "8"]


def test_small_run(tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    command = [sys.executable, str(BENCHMARKS / "offload.py"), "--gpu", "--only", "links,throughput", *SMALL]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert report["summary"]["link"] == "measured" and report["summary"]["tokens_equal"] is None
    for row in report["rows"]:
        assert row["link_gb_s"] > 1 and row["device_bytes"] > 0
        assert row["lossy"] or row["token_agreement"] > 0.5
