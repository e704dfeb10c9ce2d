"""Started on every rank: joined passes of families and settings against plain transformers, one result for each.

Usage: joint_passes.py PLAN.json OUT.json WORK_DIR. A plan is a list of runs: `family`, `mesh` as CPxTP, the engine's
section ``megakv``, the `seed` of its sequences, and whether some begin `together`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from as_large import as_large
from families import CONFIGS
from joint_passes import Interleaving
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries


def run(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The worst error over all ranks, and the methods that served."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    cp, tp = (int(part) for part in plan["mesh"].split("x"))
    section = {**plan["section"], "context_parallel": {"size": cp, **plan["section"].get("context_parallel", {})}}
    with as_large(section):
        engine = megakv.init_inference(
            str(folder), {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}
        )
    with engine:
        rows = Interleaving(engine, plain, plan["seed"], folder, together=plan["together"])
        rows.run()
        worst = engine._comm.gather_objects(rows.worst)
        methods = {stage: sorted(used) for stage, used in engine._comm.ledger.methods.items()}
    return {"worst": max(worst), "methods": methods}


def main() -> None:
    """Entry of every rank."""
    plans, out, work = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=False, timeout_s=300)
    results = []
    for index, plan in enumerate(plans):
        folder = work / str(index)
        if dist.get_rank() == 0:
            torch.manual_seed(plan["seed"])
            AutoModelForCausalLM.from_config(CONFIGS[plan["family"]](), dtype=torch.float32).save_pretrained(folder)
        dist.barrier()
        results.append(run(folder, plan))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
