"""GGUF files, and blocks made at load, on every mesh: tokens of the model with its weights unpacked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.launch import run_ranks
from tests.gguf_files import config_of, write_gguf

SCRIPT = Path(__file__).parent / "ranks" / "packed_weights.py"
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2))
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FULL = pytest.mark.full


def on_mesh(cp: int, tp: int, weights: str, models: list[Path]) -> list[dict[str, Any]]:
    out = models[0].parent / "out.json"
    run_ranks(SCRIPT, str(cp), out, weights, *models, ranks=cp * tp, timeout=60 + 60 * len(models)).check()
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    assert len(rows) == len(models) and all(row["equal"] for row in rows), rows
    return rows


def check_files(cp: int, tp: int, cases: list[tuple[str, str]], folder: Path) -> None:
    models = [
        # Blocks of 256 need wider rows for two ranks.
        write_gguf(folder / f"{family}-{kind}.gguf", config_of(family, 512 if kind.endswith("K") else 256), kind)
        for family, kind in cases
    ]
    for row, (_, kind) in zip(on_mesh(cp, tp, "as_stored", models), cases, strict=True):
        assert row["weights"] == "gguf"
        for held in row["held"]:
            assert max(held, key=held.get) == kind and held.keys() == {kind, "float32"}


def test_files_on_ranks_that_share_tokens_and_heads(tmp_path: Path) -> None:
    check_files(2, 2, [("llama", "Q4_1"), ("gemma2", "Q6_K")], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(("cp", "tp"), MESHES)
def test_all_types_on_all_meshes(cp: int, tp: int, family: str, tmp_path: Path) -> None:
    check_files(cp, tp, [(family, kind) for kind in KINDS], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("cp", "tp"), MESHES)
def test_experts_on_all_meshes(cp: int, tp: int, tmp_path: Path) -> None:
    check_files(cp, tp, [("qwen3_moe", kind) for kind in ("Q8_0", "Q4_0")], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["int8", "q4_1"])
@pytest.mark.parametrize(("cp", "tp"), MESHES)
def test_blocks_at_load_on_all_meshes(cp: int, tp: int, weights: str, tmp_path: Path) -> None:
    folders = [tmp_path / family for family in ("llama", "qwen2", "qwen3_moe")]
    for folder in folders:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config_of(folder.name), dtype=torch.float32).save_pretrained(folder)
    assert {row["weights"] for row in on_mesh(cp, tp, weights, folders)} == {weights}
