"""A compression method comes from a file outside of the package: what heads keep is what it says."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.distributed.launch import run_command
from tests.families import llama

SCRIPT = Path(__file__).parent / "ranks" / "fairkv_toy.py"


def test_heads_keep_what_the_method_of_a_plugin_says(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama(), dtype=torch.float32).save_pretrained(tmp_path / "model")
    section = {"method": "every_nth", "budget": 10, "min_tokens": 16, "stride": 4}
    case = {"section": section, "prompts": [list(range(1, 31))], "steps": 0}
    (tmp_path / "cases.json").write_text(json.dumps({"toy": case}))
    names = ("model", "cases.json", "kept.json")
    # Not forked: the process that ranks are forked from would have the method from then on.
    run_command([sys.executable, SCRIPT, *(tmp_path / name for name in names)], timeout=240).check()
    (layers,) = json.loads((tmp_path / "kept.json").read_text())["toy"]
    # 8 multiples of 4 among 30 tokens, and the two earliest others.
    expected = sorted([*range(0, 30, 4), 1, 2])
    assert all(head == expected for layer in layers for head in layer) and layers
