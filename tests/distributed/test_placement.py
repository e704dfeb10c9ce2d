"""Heads and their copies on any ranks: the plain model's tokens, and errors that say what is wrong with a mapping."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megakv.offload.method import AUTO, METHODS
from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "placement.py"
FAMILIES = ("qwen2", "qwen3", "gemma2", "falcon", "bloom", "mpt", "glm4", "gpt_oss", "llama_mqa", "smollm3", "phi")


def launch(folder: Path, ranks: int, cases: list[str]) -> dict[str, Any]:
    out = folder / f"placement-{ranks}.json"
    run_ranks(SCRIPT, out, folder, ",".join(cases), ranks=ranks, timeout=400).check()
    return json.loads(out.read_text())


def judge(results: dict[str, Any]) -> None:
    for name, result in results["cases"].items():
        assert result["equal"], (name, result["mapping"])
        # Nothing is held twice, and nothing is missing, in any layer.
        kv_heads = 1 + max(replica["kv_head"] for layer in result["mapping"] for rank in layer for replica in rank)
        for layer in zip(*result["held"], strict=True):
            assert sum(layer) == kv_heads * result["slots"], (name, result["mapping"])
        assert len(result["digest"]) == 64
        assert len(result["busy_rates"]) == len(result["held"])
        assert 0 < min(result["busy_rates"]) <= max(result["busy_rates"]) <= 1
        assert {"fairkv/utilisation", "fairkv/kept_utilisation", "fairkv/busy_rate/rank0"} <= set(result["scalars"])


def test_any_mapping_gives_the_plain_tokens(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    offloaded = [f"2x2:opt:12:1:{random.choice((*METHODS, AUTO))}", "1x4:llama:8:2:cpu_rank"]
    results = launch(
        tmp_path, 4, ["1x4:llama:50:1", "1x4:opt:20:1", "1x4:phi3:20:1", "2x2:qwen3:50:1", "1x4:llama:8:3", *offloaded]
    )
    judge(results)
    refused = results["refused"]
    assert "megakv.fairkv.mapping" in refused["two"] and "is for 2 tensor-parallel ranks" in refused["two"]
    assert "has 2 layers of 4 KV heads" not in refused["two"]
    assert "with 3 layers of 4 KV heads, but the model has 2 layers of 4 KV heads" in refused["longer"]
    assert "is not valid JSON" in refused["broken"] and "megakv fairkv map" in refused["broken"]
    assert "cannot be read" in refused["missing"]
    assert "is of another model, 'random': hidden_size 32, but this model has 64" in refused["sizes"]
    assert "is of another model, 'random': the same sizes, but other weights" in refused["weights"]
    assert not refused["right"]
    assert "megakv.fairkv.mapping: the file of rank 1 differs from that of rank 0" in refused["different"]
    if pytestconfig.getoption("--full"):
        judge(launch(tmp_path, 4, [f"{mesh}:{family}:50:1" for family in FAMILIES for mesh in ("1x4", "2x2")]))
        judge(launch(tmp_path, 2, [f"1x2:{family}:50:1" for family in ("llama", *FAMILIES)]))
        judge(launch(tmp_path, 3, ["1x3:llama:50:2", "1x3:opt:50:1"]))
        judge(launch(tmp_path, 8, ["1x8:opt:20:1", "1x8:llama:20:1", "2x4:llama:20:1"]))
