"""Started on two tensor-parallel ranks: steps as CUDA graphs, with stand-ins for CUDA, against the plain model.

Usage: step_graphs.py OUT.json
"""

from __future__ import annotations

import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pytest
import torch

import megakv
from megakv.launcher.process import orderly_end, quiet_libraries
from tests.unit.injection.replayed import Replayed, replayed
from tests.unit.injection.stepped import generate, plain_model, prompts

NEW = 9


def judge(graphs: list[Replayed]) -> dict[str, Any]:
    """Whether tokens are the plain model's, and how often graphs were replayed, call by call."""
    model = plain_model("llama")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32", "tensor_parallel": {"tp_size": 2}})
    rank, found = engine.mesh.rank, list[dict[str, Any]]()
    layer = engine.module.get_decoder().layers[0]
    for call, rows in (("first", 1), ("more", 3), ("one listens", 3), ("again", 3)):
        before = sum(graph.replays for graph in graphs)
        # Somebody on one rank alone: all take ordinary steps.
        handle = layer.register_forward_hook(lambda *_: None) if call == "one listens" and rank == 1 else None
        ids, mask = prompts(rows, 30)
        same = torch.equal(generate(engine, ids, mask), generate(model, ids, mask))
        if handle is not None:
            handle.remove()
        found.append({"call": call, "same": same, "replays": sum(graph.replays for graph in graphs) - before})
    engine.destroy()
    return {"rank": rank, "calls": found, "graphs": len(graphs)}


def main() -> None:
    """Entry of the rank."""
    quiet_libraries()
    random.seed(1)
    torch.manual_seed(1)
    with replayed(pytest.MonkeyPatch()) as graphs:
        found = judge(graphs)
    Path(f"{sys.argv[1]}.{found['rank']}").write_text(json.dumps(found))


if __name__ == "__main__":
    with orderly_end():
        main()
