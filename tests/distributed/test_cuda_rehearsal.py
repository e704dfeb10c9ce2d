"""The CUDA path on a machine without a GPU: tensors meet on one device, and a step of decoding waits for it once."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    not (ROOT / ".venv-rehearsal" / "ready").exists(), reason="needs the environment of bash scripts/cuda_rehearsal.sh"
)
def test_no_wrong_device_and_one_wait_for_each_token(tmp_path: Path) -> None:
    out = tmp_path / "rehearsal.json"
    command = ["bash", str(ROOT / "scripts" / "cuda_rehearsal.sh"), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert out.exists(), done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) > 30
    for row in rows:
        assert not row["error"], (row["path"], row["error"])
        assert row["wrong_devices"] == 0 and row["waits_per_step"] <= row["most"], row
        # That of its own: whether all rows have stopped.
        assert row["waits_of_transformers"] <= 1, row
        # In two layers a call for all kept tokens, and one for those behind them, of three sequences.
        if row["path"].startswith("compression") and "CP" not in row["path"]:
            assert row["varlen_calls"] == 4, row
