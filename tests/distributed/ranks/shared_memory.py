"""Started on every rank: engines that start the world themselves, one after the other on different meshes.

Usage: shared_memory.py OUT.json WORK_DIR MESHES, meshes as CPxTP, separated by commas.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from families import llama
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import megakv
import megakv.distributed.comm
from megakv.launcher.process import orderly_end, quiet_libraries

# Above and below the size at which the shared-memory op changes its algorithm (1 MiB of float32 here).
SHAPES = ((1, 1), (1, 130), (2, 2500))


class Counted:
    """DeepSpeed's shared-memory all-reduce, counted."""

    def __init__(self) -> None:
        self.calls = 0
        self._original = megakv.distributed.comm.inference_all_reduce
        megakv.distributed.comm.inference_all_reduce = self

    def __call__(self, tensor: torch.Tensor) -> None:
        self.calls += 1
        self._original(tensor)


def prompt(batch: int, length: int) -> torch.Tensor:
    """``[B, S]`` random tokens, the same on every rank."""
    return torch.randint(3, 190, (batch, length), generator=torch.Generator().manual_seed(length))


def error_of(model: Any, exact: torch.Tensor) -> float:
    """RMS of a model's error against exact logits."""
    with torch.no_grad():
        return (model(prompt(1, 130)).logits.double() - exact).square().mean().sqrt().item()


def run_mesh(folder: Path, mesh: str, counted: Counted) -> dict[str, Any]:
    """Tokens in float32 and precision in bfloat16 of one mesh, against the plain model."""
    cp, tp = (int(part) for part in mesh.split("x"))
    section = {"tensor_parallel": {"tp_size": tp}, "megakv": {"context_parallel": {"size": cp}}}
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    counted.calls = 0
    engine = megakv.init_inference(str(folder), {"dtype": "fp32", **section})
    equal = [
        torch.equal(engine.generate(ids, **options), plain.generate(ids, **options))
        for ids in (prompt(*shape) for shape in SHAPES)
    ]
    result = {"mesh": mesh, "equal": equal, "shared_memory": engine.mesh.shared_memory, "calls": counted.calls}
    engine.destroy()
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    # The reference has the very weights of the bf16 models.
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).double()(prompt(1, 130)).logits.detach()
    engine = megakv.init_inference(str(folder), {"dtype": "bf16", **section})
    result["errors"] = [error_of(engine, exact), error_of(half, exact)]
    engine.destroy()
    result["files"] = sorted(path.name for path in Path("/dev/shm").glob(f"deepspeed*_{os.environ['MASTER_PORT']}_*"))
    return result


def main() -> None:
    """Entry of every rank."""
    out, work, meshes = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(",")
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    # No group stands yet, so every rank makes the model for itself: the same one.
    folder = work / f"model-{os.environ['RANK']}"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama(), dtype=torch.float32).save_pretrained(folder)
    counted = Counted()
    results = [run_mesh(folder, mesh, counted) for mesh in meshes]
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
