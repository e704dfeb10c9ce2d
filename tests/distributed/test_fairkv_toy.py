"""A new compression method is one file and one registry line: the JSON and ``megakv check`` know it."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.distributed.launch import run_ranks
from tests.families import llama

SCRIPT = Path(__file__).parent / "ranks" / "fairkv_toy.py"


def test_a_method_of_one_file_and_one_line(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama(), dtype=torch.float32).save_pretrained(tmp_path / "model")
    section = {"method": "every_nth", "budget": 10, "min_tokens": 16, "stride": 4}
    files = {
        "cases": {"toy": {"section": section, "prompts": [list(range(1, 31))], "steps": 0}},
        "config": {"dtype": "fp32", "megakv": {"fairkv": section}},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    names = ("model", "cases.json", "kept.json", "config.json", "checked.json")
    # Not forked: the process that ranks are forked from has read the registry already.
    run_ranks(SCRIPT, *(tmp_path / name for name in names), ranks=1, timeout=240, launcher="torchrun").check()
    (layers,) = json.loads((tmp_path / "kept.json").read_text())["toy"]
    # 8 multiples of 4 among 30 tokens, and the two earliest others.
    expected = sorted([*range(0, 30, 4), 1, 2])
    assert all(head == expected for layer in layers for head in layer) and layers
    checked = json.loads((tmp_path / "checked.json").read_text())
    assert "every_nth" in checked["methods"]["megakv.fairkv.method"]
    assert checked["settings"]["fairkv"]["stride"] == 4
