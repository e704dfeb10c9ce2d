"""Models, files and engines of random cases; and what one rank answers that loses the same where settings lose some."""

from __future__ import annotations

import json
import random
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import megakv
from megakv.weights.placement import head_counts
from tests.as_large import as_large
from tests.distributed.asking import Answer, Asked
from tests.distributed.random_cases import Case
from tests.distributed.random_sections import DRAWN, lossy_part
from tests.families import CONFIGS
from tests.mappings import random_mapping

NOISE = 1e-6
"""Relative changes of all weights of a disturbed model."""


def make_model(case: Case, noise: int = 0) -> PreTrainedModel:
    """The case's model, the same on every rank; norms and biases are off their neutral values."""
    torch.manual_seed(case.seed)
    # Eager attention knows soft caps and sinks, but adds Falcon's ALiBi twice.
    attention = "sdpa" if case.family == "falcon_alibi" else "eager"
    config = CONFIGS[case.family]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if noise:
            torch.manual_seed(noise)
            for parameter in model.parameters():
                parameter.mul_(1 + NOISE * torch.randn_like(parameter))
    return model


def write_files(case: Case, folder: Path) -> None:
    """What sections of a case may name: a mapping, an importance of heads, a folder on disk."""
    layers, _, kv_heads = head_counts(CONFIGS[case.family]())
    random.seed(case.seed)
    random_mapping(layers, kv_heads, case.sizes[1]).save(folder / f"mapping-{case.name}.json")
    importance = {"importance": np.random.default_rng(case.seed).random((layers, kv_heads)).tolist()}
    (folder / f"importance-{case.name}.json").write_text(json.dumps(importance))
    (folder / f"disk-{case.name}").mkdir(exist_ok=True)


def make_engine(case: Case, source: PreTrainedModel | Path, section: dict[str, Any], folder: Path) -> Any:
    """An engine, or the error with which it was refused."""
    if "offload" in section:
        section = {**section, "offload": {**section["offload"], "disk_path": str(folder / f"disk-{case.name}")}}
    if "fairkv" in section:
        fairkv = section["fairkv"].items()
        files = {key: str(folder / f"{key}-{case.name}.json") for key, value in fairkv if value == DRAWN}
        section = {**section, "fairkv": {**section["fairkv"], **files}}
    config = {"dtype": "fp32", "tensor_parallel": {"tp_size": case.sizes[1]}, "megakv": section}
    try:
        with as_large(section):
            return megakv.init_inference(source if isinstance(source, PreTrainedModel) else str(source), config)
    except ValueError as error:
        return error


def answers_alone(case: Case, folder: Path, *, noise: int = 0) -> list[list[Answer] | str]:
    """What one rank answers to a case, and to the one that goes on from it, with what of their settings is lossy.

    Where it is refused, or fails, that is what it says.
    """
    found: list[list[Answer] | str] = []
    folder.mkdir(exist_ok=True)
    for part in case.parts:
        single = replace(part, mesh="1x1")
        write_files(single, folder)
        engine = make_engine(single, make_model(part, noise), lossy_part(part.section), folder)
        if isinstance(engine, ValueError):
            found.append(f"refused: {engine}")
            continue
        asked = Asked(single, folder, engine)
        try:
            found.append([getattr(asked, action["do"])(action) for action in part.script])
        except Exception:
            found.append("".join(traceback.format_exc().splitlines(keepends=True)[-9:]))
        engine.destroy()
    return found
