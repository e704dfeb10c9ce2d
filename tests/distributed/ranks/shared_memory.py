"""Started on every rank: engines that start the world themselves, one after the other on different meshes.

Usage: shared_memory.py OUT.json MODEL ANSWERS.safetensors MESHES, meshes as CPxTP, separated by commas. ANSWERS holds
what the plain model generates for every prompt, ``tokens.N``, and its ``exact`` logits for the prompt of `PRECISE`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import megakv
import megakv.distributed.comm
from megakv.launcher.process import orderly_end, quiet_libraries

# Above and below the size at which the shared-memory op changes its algorithm (1 MiB of float32 here).
SHAPES = ((1, 1), (1, 130), (2, 2500))
PRECISE = (1, 130)
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


class Counted:
    """DeepSpeed's shared-memory all-reduce, counted."""

    def __init__(self) -> None:
        self.calls = 0
        self._original = megakv.distributed.comm.inference_all_reduce
        megakv.distributed.comm.inference_all_reduce = self

    def __call__(self, tensor: Tensor) -> None:
        self.calls += 1
        self._original(tensor)


def prompt(batch: int, length: int) -> Tensor:
    """``[B, S]`` random tokens, the same on every rank."""
    return torch.randint(3, 190, (batch, length), generator=torch.Generator().manual_seed(length))


def error_of(model: Any, exact: Tensor) -> float:
    """RMS of a model's error against exact logits."""
    with torch.no_grad():
        return (model(prompt(*PRECISE)).logits.double() - exact).square().mean().sqrt().item()


def run_mesh(folder: str, answers: dict[str, Tensor], mesh: str, counted: Counted) -> dict[str, Any]:
    """Tokens in float32 and precision in bfloat16 of one mesh, against the plain model."""
    cp, tp = (int(part) for part in mesh.split("x"))
    section = {"tensor_parallel": {"tp_size": tp}, "megakv": {"context_parallel": {"size": cp}}}
    counted.calls = 0
    engine = megakv.init_inference(folder, {"dtype": "fp32", **section})
    equal = [
        torch.equal(engine.generate(prompt(*shape), **OPTIONS), answers[f"tokens.{index}"])
        for index, shape in enumerate(SHAPES)
    ]
    result = {"mesh": mesh, "equal": equal, "shared_memory": engine.mesh.shared_memory, "calls": counted.calls}
    engine.destroy()
    engine = megakv.init_inference(folder, {"dtype": "bf16", **section})
    result["error"] = error_of(engine, answers["exact"])
    engine.destroy()
    result["files"] = sorted(path.name for path in Path("/dev/shm").glob(f"deepspeed*_{os.environ['MASTER_PORT']}_*"))
    return result


def main() -> None:
    """Entry of every rank."""
    out, folder, answers, meshes = sys.argv[1:]
    torch.set_num_threads(1)
    quiet_libraries()
    counted = Counted()
    results = [run_mesh(folder, load_file(answers), mesh, counted) for mesh in meshes.split(",")]
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
