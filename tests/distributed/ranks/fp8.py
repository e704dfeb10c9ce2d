"""Started on two ranks: FP8 feed-forward layers and experts, with their weights offloaded and without.

Usage: fp8.py OUT.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from families import CONFIGS
from transformers import AutoModelForCausalLM

import megakv
from megakv.launcher.process import orderly_end, quiet_libraries

OFFLOAD = {"enabled": True, "method": "stream", "weights": True, "host_gb": 0.05, "page_kib": 8}


def answer(family: str, mesh: str, offload: dict[str, Any]) -> tuple[list[Any], list[int], int]:
    """An engine's tokens, what each rank's steps brought of weights, and this rank."""
    cp, tp = (int(part) for part in mesh.split("x"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    section = {"context_parallel": {"size": cp}, "weights": {"format": "fp8"}, "offload": offload}
    settings = {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}
    with megakv.init_inference(model, settings) as engine:
        ids = torch.randint(3, 190, (3, 29), generator=torch.Generator().manual_seed(5))
        found = engine.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        weights = 0 if engine._offloader is None else engine._offloader.weights.step_bytes
        return engine._comm.gather_objects(found.tolist()), engine._comm.gather_objects(weights), engine.mesh.rank


def main() -> None:
    """Entry of every rank."""
    torch.set_num_threads(1)
    quiet_libraries()
    rows = []
    for family in ("gpt_oss", "qwen3_moe"):
        for mesh in ("1x2", "2x1"):
            wanted, _, rank = answer(family, mesh, {})
            found, brought, _ = answer(family, mesh, OFFLOAD)
            equal = all(tokens == wanted[0] for tokens in (*wanted, *found))
            rows.append({"family": family, "mesh": mesh, "equal": equal, "brought": brought})
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":
    with orderly_end():
        main()
