"""Started on every rank: runs families over meshes against plain transformers and writes what it found as JSON.

Usage: exactness.py OUT.json WORK_DIR MESHES FAMILIES, both lists comma-separated, meshes as CPxTP.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from families import FAMILIES
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import megakv
from megakv.groups import start_distributed
from megakv.launcher.voice import quiet_libraries

LENGTHS = (1, 2, 3, 5, 7, 64, 127, 1000)
DECODED = 8
METHODS = {"decode": ("replicated", "pass_q"), "prefill": ("pass_kv", "pass_q", "all_gather")}


def tokens(vocabulary: int, batch: int, length: int, seed: int) -> Tensor:
    """``[B, S]`` random tokens, the same on every rank."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def cases(vocabulary: int, max_length: int) -> list[dict[str, Any]]:
    """Prompts and generation options that every family and mesh must get right."""
    found: list[dict[str, Any]] = [
        {"name": f"greedy {length}", "ids": tokens(vocabulary, 1, length, length), "options": {}}
        for length in LENGTHS
        if length + DECODED <= max_length
    ]
    ids = tokens(vocabulary, 3, 41, 99)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    mask[2, :39] = 0
    ragged = {"ids": ids.masked_fill(mask == 0, 0), "mask": mask}
    found += [
        {"name": "ragged greedy", **ragged, "options": {}},
        {"name": "ragged sampled", **ragged, "options": {"do_sample": True, "top_k": 20}},
        {"name": "ragged beams", **ragged, "options": {"num_beams": 3}},
    ]
    return found


def answer(model: Any, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits at real tokens, and generated tokens."""
    ids, mask = case["ids"], case.get("mask")
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.manual_seed(7)
    options = {"do_sample": False, "max_new_tokens": DECODED, "pad_token_id": 0, **case["options"]}
    generated = model.generate(ids, attention_mask=mask, **options)
    return (logits if mask is None else logits[mask.bool()]), generated


def reference(name: str, folder: Path, family_cases: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
    """The plain model's answers. A fresh model a case: length-dependent rotary embeddings keep state."""
    answers = []
    for case in family_cases:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        answers.append(answer(plain, case))
    return answers


def compare(engine: Any, family_cases: list[dict[str, Any]], answers: list[Any]) -> list[dict[str, Any]]:
    """Run the cases through an engine; rank 0 compares."""
    results = []
    for index, case in enumerate(family_cases):
        logits, generated = answer(engine, case)
        if answers:
            wanted, expected = answers[index]
            error = ((logits - wanted).abs().max() / wanted.abs().max()).item()
            results.append({"case": case["name"], "error": error, "equal": torch.equal(generated, expected)})
    return results


def run_mesh(folder: Path, mesh: str, section: dict[str, Any], family_cases: list[Any], answers: list[Any]) -> Any:
    """One engine on one mesh: its results, or the message with which it refused."""
    cp, tp = (int(part) for part in mesh.split("x"))
    config = {
        "dtype": "fp32",
        "tensor_parallel": {"tp_size": tp},
        "megakv": {"context_parallel": {"size": cp, **section}},
    }
    try:
        engine = megakv.init_inference(str(folder), config)
    except ValueError as error:
        return str(error)
    results = compare(engine, family_cases, answers)
    engine.destroy()
    return results


def main() -> None:
    """Entry of every rank."""
    out, work, meshes, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4].split(",")
    torch.set_num_threads(1)
    quiet_libraries()
    start_distributed(tp_only=False, timeout_s=300)
    rank = dist.get_rank()
    rows = []
    for name in names:
        config = FAMILIES[name]()
        folder = work / name
        if rank == 0:
            torch.manual_seed(0)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.save_pretrained(folder)
        text = config.get_text_config()
        family_cases = cases(text.vocab_size, text.max_position_embeddings)
        dist.barrier()
        answers = reference(name, folder, family_cases) if rank == 0 else []
        for mesh in meshes:
            sections: list[dict[str, Any]] = [{}]
            if name == "llama" and mesh != "1x4":
                sections += [{kind: method} for kind, methods in METHODS.items() for method in methods]
            for section in sections:
                result = run_mesh(folder, mesh, section, family_cases, answers)
                rows.append({"family": name, "mesh": mesh, "section": section, "result": result})
    if rank == 0:
        Path(out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
