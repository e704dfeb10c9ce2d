"""Started on every rank: runs engines one after the other, and writes the tokens that each gave as JSON.

Usage: tokens.py PLAN.json OUT.json. A plan is a list of runs: `model`, `config`, a `prompt` of tokens, and how many are
`decoded`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import megakv
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries


def main() -> None:
    """Entry of every rank."""
    torch.set_num_threads(1)
    quiet_libraries()
    start_distributed(tp_only=False, timeout_s=120)
    found = []
    for run in json.loads(Path(sys.argv[1]).read_text()):
        with megakv.init_inference(run["model"], run["config"]) as engine:
            ids = torch.tensor([run["prompt"]])
            answer = engine.generate(ids, do_sample=False, max_new_tokens=run["decoded"], pad_token_id=0)
            found.append(answer[0, ids.shape[1] :].tolist())
            first = engine.mesh.rank == 0
    if first:
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    with orderly_end():
        main()
