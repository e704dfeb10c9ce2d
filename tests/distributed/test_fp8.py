"""FP8 feed-forward layers over tensor- and context-parallel ranks: through the main job, and with offloaded weights."""

import json
from pathlib import Path

import pytest

from megakv.tracking.report import load_report
from tests.distributed.launch import ROOT, run_ranks

RECIPE = ROOT / "recipes" / "passkey"
SCRIPT = Path(__file__).parent / "ranks" / "fp8.py"


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_main_job_finds_the_number(tmp_path: Path, cp: int, tp: int) -> None:
    config, out = tmp_path / "fp8.json", tmp_path / "out.json"
    section = {"weights": {"format": "fp8"}, "context_parallel": {"size": cp}}
    config.write_text(json.dumps({"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}))
    result = run_ranks(
        RECIPE / "ask.py", "--config", config, "--tokens", "1024", "--json", out, ranks=cp * tp, timeout=240
    ).check()
    assert load_report(out).answers[0].correct is True, result.stdout


def test_offloaded_weights_give_the_same_tokens(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_ranks(SCRIPT, out, ranks=2, timeout=240).check()
    rows = json.loads(out.read_text())
    assert [(row["family"], row["mesh"]) for row in rows] == [
        (family, mesh) for family in ("gpt_oss", "qwen3_moe") for mesh in ("1x2", "2x1")
    ]
    assert all(row["equal"] and all(row["brought"]) for row in rows), rows
