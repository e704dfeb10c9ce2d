"""A model with an adapter on two ranks gives the tokens of what peft merges."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.adapters import SETTINGS, merged, save_adapter, save_base
from tests.distributed.launch import run_command, run_ranks
from tests.distributed.models import prose, save_model
from tests.families import VOCAB, llama

SCRIPT = Path(__file__).parent / "ranks" / "tokens.py"
DECODED = 6
MESHES = ((2, 1), (1, 2))


@pytest.mark.parametrize("name", ["dora", *(pytest.param(name, marks=pytest.mark.full) for name in ("all", "saved"))])
def test_two_ranks_give_the_merged_model_s_tokens(name: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_base(llama(), base)
    save_adapter(base, adapter, **SETTINGS[name])
    prompt = torch.randint(1, VOCAB, (1, 70))
    model = merged(base, adapter, torch.float32)
    wanted = model.generate(prompt, do_sample=False, max_new_tokens=DECODED, pad_token_id=0)[0, 70:].tolist()
    run = {"model": str(base), "prompt": prompt[0].tolist(), "decoded": DECODED}
    sections = [
        {
            "tensor_parallel": {"tp_size": tp},
            "megakv": {"context_parallel": {"size": cp}, "adapter": str(adapter)},
        }
        for cp, tp in MESHES
    ]
    (tmp_path / "plan.json").write_text(json.dumps([{**run, "config": {"dtype": "fp32", **each}} for each in sections]))
    run_ranks(SCRIPT, tmp_path / "plan.json", tmp_path / "out.json", ranks=2, timeout=120).check()
    assert json.loads((tmp_path / "out.json").read_text()) == [wanted] * len(MESHES)


@pytest.mark.full
def test_the_command_takes_one_and_compares(tmp_path: Path) -> None:
    base, adapter, out = save_model(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out.json"
    save_adapter(base, adapter, **SETTINGS["all"])
    words = ["--cp", "2", "--dtype", "fp32", "--question", prose(30), "--max-new-tokens", "5", "--compare"]
    command = [sys.executable, "-m", "megakv", "run", str(base), "--adapter", str(adapter), *words, "--json", str(out)]
    run_command(command, timeout=240).check()
    outcome = json.loads(out.read_text())
    assert outcome["tokens_equal"] is True and outcome["model"] == f"{base} + {adapter}"
    failed = run_command([*command[:6], str(base), *words], timeout=240)
    assert failed.returncode == 1 and failed.stderr.count("has no adapter_config.json") == 1
