"""NVIDIA's kvpress as an oracle: its presses keep the same tokens.

It needs an older transformers than MegaKV, so it runs in an environment of its own, which `scripts/kvpress.sh` makes.
"""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.launch import ROOT, run_ranks
from tests.families import VOCAB, llama

PYTHON = Path(os.environ.get("MEGAKV_KVPRESS_PYTHON", ROOT / ".venv-kvpress" / "bin" / "python"))
COUNT, WINDOW = 50, 8

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no environment with kvpress ({PYTHON}): bash scripts/kvpress.sh makes one"
)


def test_the_same_tokens_as_kvpress(tmp_path: Path) -> None:
    torch.manual_seed(random.getrandbits(32))
    # Sharp attention: scores differ by far more than the rounding of another transformers.
    model = AutoModelForCausalLM.from_config(llama(initializer_range=0.3), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    prompts = [[random.randrange(1, VOCAB) for _ in range(length)] for length in (151, 90, 300)]
    snapkv = {"budget": COUNT, "window": WINDOW, "pool": 1, "min_tokens": 64}
    sections = {
        "streaming_llm": {"method": "streaming_llm", "budget": COUNT, "sinks": 4, "min_tokens": 64},
        "snapkv": {"method": "snapkv", **snapkv},
        "ada_snapkv": {"method": "ada_snapkv", "safeguard": 0.0, **snapkv},
    }
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "sections.json").write_text(json.dumps(sections))
    words = [tmp_path / "model", tmp_path / "prompts.json"]
    script = Path(__file__).parent / "ranks" / "fairkv_kept.py"
    run_ranks(script, *words, tmp_path / "sections.json", tmp_path / "own.json", ranks=1, timeout=120).check()
    oracle = Path(__file__).parents[1] / "oracles" / "kvpress_kept.py"
    command = [PYTHON, oracle, *words, str(COUNT), str(WINDOW), tmp_path / "theirs.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    own, theirs = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("own", "theirs"))
    for found, expected in zip(own, theirs, strict=True):
        assert found == expected
        assert len({len(head) for head in found["ada_snapkv"][0]}) > 1
