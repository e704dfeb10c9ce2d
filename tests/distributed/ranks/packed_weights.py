"""Started on any number of ranks: tokens of packed weights on a mesh, beside those of transformers' unpacked model.

Usage: packed_weights.py CP OUT.json FORMAT MODEL...
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import megakv
from megakv.engine.loading import build_model
from megakv.launcher.process import orderly_end, quiet_libraries
from megakv.weights.folder import local_directory
from megakv.weights.packed_linear import unpack_modules

PROMPTS, NEW = (3, 61), 12


def plain(model: str, weights: str) -> PreTrainedModel:
    """The whole model with its weights unpacked."""
    loaded = build_model(local_directory(model), dtype=torch.float32, weights=weights, all_reduce=lambda t: t)
    unpack_modules(loaded.module, torch.float32)
    return loaded.module


def row_of(model: str, cp: int, weights: str) -> dict[str, Any]:
    """What an engine's tokens are, and in which types ranks hold the weights."""
    ids = torch.randint(3, 190, PROMPTS, generator=torch.Generator().manual_seed(7))
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    section = {"context_parallel": {"size": cp}, "weights": {"format": weights}}
    settings = {"dtype": "fp32", "tensor_parallel": {"tp_size": world // cp}, "megakv": section}
    with megakv.init_inference(model, settings) as engine:
        tokens = engine.generate(ids, **options).tolist()
        report = engine.report()
        everywhere = engine._comm.gather_objects(tokens)
        wanted = plain(model, weights).generate(ids, **options).tolist() if engine.mesh.rank == 0 else None
    return {
        "model": Path(model).name,
        "rank": engine.mesh.rank,
        "equal": all(found == wanted for found in everywhere),
        "weights": report.weights,
        "held": [each.weight_bytes for each in report.ranks],
    }


def main() -> None:
    """Entry of every rank."""
    torch.set_num_threads(1)
    quiet_libraries()
    cp, out, weights, *models = sys.argv[1:]
    rows = [row_of(model, int(cp), weights) for model in models]
    if rows[0]["rank"] == 0:
        Path(out).write_text(json.dumps(rows))
        for model in models:
            if model.endswith(".gguf"):
                shutil.rmtree(local_directory(model))


if __name__ == "__main__":
    with orderly_end():
        main()
