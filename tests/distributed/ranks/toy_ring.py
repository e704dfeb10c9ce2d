"""Started on every rank: a method that a plugin registers serves an engine that its JSON asks for it.

Usage: toy_ring.py CONFIG.json OUT.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "examples"))

import torch
from families import llama
from transformers import AutoModelForCausalLM

import megakv
from megakv.launcher.process import orderly_end, quiet_libraries

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def main() -> None:
    """Entry of every rank."""
    torch.set_num_threads(1)
    quiet_libraries()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(), dtype=torch.float32).eval()
    ids = torch.randint(3, 120, (2, 61), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
    with megakv.init_inference(model, sys.argv[1]) as engine:
        found = engine.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
        traffic = {each.operation for rank in engine.report().ranks for each in rank.traffic}
        if engine.mesh.rank == 0:
            same = torch.equal(found, plain)
            Path(sys.argv[2]).write_text(json.dumps({"same": same, "traffic": sorted(traffic)}))


if __name__ == "__main__":
    with orderly_end():
        main()
