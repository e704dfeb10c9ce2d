"""Started on every rank: runs families over meshes against plain transformers and writes what it found as JSON.

Usage: exactness.py PLAN.json OUT.json WORK_DIR. A plan is a list of runs: `family`, `mesh` as CPxTP, `section` of
``megakv.context_parallel``, the names of its `cases`, how many tokens are `decoded`, and perhaps ``megakv.offload``,
whose tokens are divided by `even_costs` where the run asks for them. One family's runs have the same `decoded`.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from as_large import as_large
from even_costs import even_costs
from families import CONFIGS
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries

Answer = tuple[Tensor, Tensor]
CHUNK = 20
"""Tokens of a prompt that are read at a time where it is read in chunks."""
RAGGED_OPTIONS: dict[str, dict[str, Any]] = {
    "ragged greedy": {},
    "ragged sampled": {"do_sample": True, "top_k": 20},
    "ragged beams": {"num_beams": 3},
}


def save(name: str, folder: Path) -> None:
    """A random model of a family, written out; norms and biases moved off their neutral values."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def tokens(vocabulary: int, batch: int, length: int, seed: int) -> Tensor:
    """``[B, S]`` random tokens, the same on every rank."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_case(name: str, vocabulary: int) -> dict[str, Any]:
    """A prompt and generation options, from a name such as ``greedy 64``, ``autocast 64`` or ``ragged beams``."""
    kind, size = name.split()
    if kind == "padded":
        ids = tokens(vocabulary, 3, int(size), int(size))
        mask = torch.ones_like(ids)
        # The first piece has no token at all, the second none of the last row.
        mask[:, : CHUNK + 2] = 0
        mask[2, : 2 * CHUNK + 1] = 0
        return {"name": name, "ids": ids * mask, "mask": mask, "options": {"prefill_chunk_size": CHUNK}}
    if kind != "ragged":
        options = {"prefill_chunk_size": CHUNK} if kind == "chunked" else {}
        return {"name": name, "ids": tokens(vocabulary, 1, int(size), int(size)), "mask": None, "options": options}
    ids = tokens(vocabulary, 3, 41, 99)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    mask[2, :39] = 0
    return {"name": name, "ids": ids.masked_fill(mask == 0, 0), "mask": mask, "options": RAGGED_OPTIONS[name]}


def is_autocast(case: dict[str, Any]) -> bool:
    """Whether a case is one under autocast, where roundings decide about tokens: only logits are looked at."""
    return bool(case["name"].startswith("autocast"))


def autocast_answer(model: Any, case: dict[str, Any], *, enabled: bool) -> Tensor:
    """Logits of a prompt under autocast, or without it."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        logits: Tensor = model(input_ids=case["ids"], use_cache=False).logits.float()
    return logits


def answer(model: Any, case: dict[str, Any], decoded: int) -> Answer:
    """Logits at real tokens, and generated tokens."""
    ids, mask = case["ids"], case["mask"]
    if is_autocast(case):
        return autocast_answer(model, case, enabled=True), ids
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.manual_seed(7)
    options = {"do_sample": False, "max_new_tokens": decoded, "pad_token_id": 0, **case["options"]}
    generated = model.generate(ids, attention_mask=mask, **options)
    return (logits if mask is None else logits[mask.bool()]), generated


def references(name: str, folder: Path, family_cases: dict[str, dict[str, Any]], decoded: int) -> dict[str, Answer]:
    """The plain model's answers on every rank; each rank computes its share of the cases."""
    # transformers' eager attention is the one that knows soft caps and sinks, but for Falcon it adds ALiBi twice.
    attention = "sdpa" if name == "falcon_alibi" else "eager"
    answers = {}
    for case in list(family_cases)[dist.get_rank() :: dist.get_world_size()]:
        # A fresh model a case: length-dependent rotary embeddings keep state.
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
        answers[case] = answer(plain, family_cases[case], decoded)
        if is_autocast(family_cases[case]):
            answers[case] = answers[case][0], autocast_answer(plain, family_cases[case], enabled=False)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, answers)
    return {case: found for part in everyone for case, found in part.items()}


def compare(engine: Any, case: dict[str, Any], wanted: Answer, decoded: int) -> dict[str, Any]:
    """One case through an engine, against the plain model's answer; the worst of all ranks."""
    try:
        logits, generated = answer(engine, case, decoded)
    except Exception as error:  # one model's failure must not hide the results of all others
        return {"case": case["name"], "failure": f"{type(error).__name__}: {error}"}
    relative = ((logits - wanted[0]).abs().max() / wanted[0].abs().max()).item()
    equal = torch.equal(generated, wanted[1])
    if is_autocast(case):
        # Errors against the exact logits, over that of transformers.
        squares = [(found - wanted[1]).square().mean() for found in (logits, wanted[0])]
        relative, equal = (squares[0] / squares[1]).sqrt().item(), True
    everyone = engine._comm.gather_objects((relative, equal))
    steps = [] if engine._offloader is None else engine._offloader.steps
    recomputed = engine._comm.gather_objects(sum(step.split.recomputed for step in steps))
    on_host = engine._comm.gather_objects(sum(step.split.on_host for step in steps))
    return {
        "case": case["name"],
        # A comparison with NaN is false: it must not pass as the smaller one.
        "error": max((error for error, _ in everyone), key=lambda error: (error != error, error)),
        "equal": all(equal for _, equal in everyone),
        "recomputed": min(recomputed),
        "on_host": min(on_host),
        "tiers": engine._comm.gather_objects(sum(step.split.tokens for step in steps)),
        "plans": engine._comm.gather_objects([step.plan.name for step in steps]),
    }


def run_mesh(folder: Path, run: dict[str, Any], cases: list[dict[str, Any]], answers: dict[str, Answer]) -> Any:
    """One engine on one mesh: its results, or the message with which it refused."""
    cp, tp = (int(part) for part in run["mesh"].split("x"))
    config = {
        "dtype": "fp32",
        "tensor_parallel": {"tp_size": tp},
        "megakv": {"context_parallel": {"size": cp, **run["section"]}, "offload": run.get("offload", {})},
    }
    try:
        with as_large(config["megakv"]):
            engine = megakv.init_inference(str(folder), config)
    except ValueError as error:
        return str(error)
    with even_costs() if run.get("even_costs") else nullcontext():
        results = [compare(engine, case, answers[case["name"]], run["decoded"]) for case in cases]
    engine.destroy()
    return results


def main() -> None:
    """Entry of every rank."""
    plan, out, work = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=False, timeout_s=300)
    rows = []
    for name in dict.fromkeys(run["family"] for run in plan):
        runs = [run for run in plan if run["family"] == name]
        folder = work / name
        if dist.get_rank() == 0:
            save(name, folder)
        dist.barrier()
        vocabulary = CONFIGS[name]().get_text_config().vocab_size
        # Ascending lengths: an engine's dynamic rotary embedding must not remember a longer one.
        cases = {case: make_case(case, vocabulary) for run in runs for case in run["cases"]}
        answers = references(name, folder, cases, runs[0]["decoded"])
        for run in runs:
            result = run_mesh(folder, run, [cases[case] for case in run["cases"]], answers)
            rows.append({"family": name, "mesh": run["mesh"], "section": run["section"], "result": result})
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))


if __name__ == "__main__":
    with orderly_end():
        main()
