"""Started on every rank: engines of random cases, each asked what plain transformers is asked on one process.

Usage: random_engines.py OUT.jsonl WORK_DIR SEED[,SEED...]. A line of OUT is one case: its `seed`, how many `actions`
were compared, and perhaps with what message it was `refused`, what its `failure` was, or that it ended in a `tie`.
WORK_DIR/running names the case under way. Sessions that fewer ranks go on with, and their cases, are left in WORK_DIR.
"""

from __future__ import annotations

import gc
import io
import json
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import megakv
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries
from tests.distributed.asking import Answer, Asked, Plain, differs
from tests.distributed.random_cases import Action, Case, draw
from tests.families import CONFIGS

NOISE, DISTURBED = 1e-6, 8
"""Relative changes of all weights, and how many models with such: what they disagree on is a tie."""


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


def plain_answers(case: Case, before: list[Action], *, noise: int = 0) -> list[Answer]:
    """What plain transformers says to each action of a case, after those of the launch before."""
    plain = Plain(make_model(case, noise))
    answers = [getattr(plain, action["do"])(action) for action in [*before, *case.script]]
    return answers[len(before) :]


def agreed(problem: str | None) -> str | None:
    """The problem of the first rank that has one."""
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None), None)


def is_tie(case: Case, before: list[Action], step: int, found: Answer) -> bool:
    """Whether a model whose weights differ by rounding errors gives the answer; asked of all ranks, computed by one."""
    verdict = [False]
    if dist.get_rank() == 0:
        cut = replace(case, script=case.script[: step + 1])
        verdict = [any(differs(found, plain_answers(cut, before, noise=n + 1)[-1]) is None for n in range(DISTURBED))]
    dist.broadcast_object_list(verdict)
    return verdict[0]


def resources() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def leaks(before: tuple[int, int]) -> str | None:
    """What a closed engine did not give back."""
    deadline = time.monotonic() + 15
    while any(now > then for now, then in zip(resources(), before, strict=True)):
        if time.monotonic() > deadline:
            threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
            return f"threads and files after destroy(): {resources()} {threads}, before the engine: {before}"
        time.sleep(0.01)
    return None


def make_engine(case: Case, source: PreTrainedModel | Path, section: dict[str, Any], disk: Path) -> Any:
    """An engine, or the message with which it was refused."""
    if "offload" in section:
        section = {**section, "offload": {**section["offload"], "disk_path": str(disk)}}
    config = {"dtype": "fp32", "tensor_parallel": {"tp_size": case.sizes[1]}, "megakv": section}
    try:
        return megakv.init_inference(source if isinstance(source, PreTrainedModel) else str(source), config)
    except ValueError as error:
        return str(error)


def run_script(case: Case, before: list[Action], wanted: list[Answer], asked: Asked) -> dict[str, Any]:
    """All actions of a case on its engine, until one fails."""
    for step, (action, expected) in enumerate(zip(case.script, wanted, strict=True)):
        found: Answer = {}
        try:
            found = getattr(asked, action["do"])(action)
            problem = differs(found, expected)
        except Exception:
            problem = "".join(traceback.format_exc().splitlines(keepends=True)[-9:])
        problem = agreed(problem)
        if problem is not None:
            outcome = "tie" if found and is_tie(case, before, step, found) else "failure"
            return {"actions": step + 1, outcome: f"{action}\n{problem}"}
    return {"actions": len(case.script)}


def run(case: Case, before: list[Action], wanted: list[Answer], folder: Path) -> dict[str, Any]:
    """One case's line."""
    line: dict[str, Any] = {"seed": case.seed, "ranks": case.ranks}
    model, path, disk = make_model(case), folder / f"model-{case.ranks}-{case.seed}", folder / f"disk-{case.seed}"
    if dist.get_rank() == 0:
        disk.mkdir(exist_ok=True)
        model.save_pretrained(path)
    dist.barrier()
    engine = make_engine(case, model if case.source == "module" else path, case.section, disk)
    if isinstance(engine, str):
        return line | {"refused": engine}
    other = None if case.neighbour is None else make_engine(case, path, case.neighbour, disk)
    line |= run_script(case, before, wanted, Asked(case, folder, engine))
    if isinstance(other, str):
        line["refused neighbour"] = other
    elif other is not None:
        # It was made before the first was used, and is used after.
        stateless = [pair for pair in zip(case.script, wanted, strict=True) if pair[0]["do"] in ("forward", "generate")]
        beside = replace(case, script=[action for action, _ in stateless])
        second = run_script(beside, [], [answer for _, answer in stateless], Asked(beside, folder, other))
        line |= {f"{name} of the second engine": second[name] for name in ("tie", "failure") if name in second}
        other.destroy()
    engine.destroy()
    whole = case.source == "module" and case.sizes[1] == 1 and not case.section.get("offload", {}).get("weights")
    if whole:
        action = {"do": "forward", "rows": [9, 14], "side": "left", "spare": 0, "seed": case.seed}
        problem = differs(Plain(model).forward(action), Plain(make_model(case)).forward(action))
        line |= {} if problem is None else {"failure": f"the module after destroy(): {problem}"}
    left = list(disk.iterdir())
    return line | ({"failure": f"left on disk: {left}"} if left else {})


def draw_all(folder: Path, seeds: list[int]) -> list[tuple[Case, list[Action]]]:
    """This launch's cases, each with what an earlier launch was asked before it."""
    ranks = dist.get_world_size()
    cases: list[tuple[Case, list[Action]]] = [(draw(seed, ranks), []) for seed in seeds]
    for path in sorted(folder.glob(f"then-{ranks}-*")):
        first = draw(*json.loads(path.read_text()))
        assert first.then is not None
        cases.append((first.then, first.script))
    return cases


def main() -> None:
    """Entry of every rank."""
    out, folder, seeds = Path(sys.argv[1]), Path(sys.argv[2]), [int(seed) for seed in sys.argv[3].split(",")]
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    set_verbosity_error()
    # Its watch over progress bars stays, once there was one.
    tqdm(total=1, file=io.StringIO()).close()
    start_distributed(tp_only=False, timeout_s=300)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cases, held = draw_all(folder, seeds), None
    for start in range(0, len(cases), 2 * ranks):
        group = cases[start : start + 2 * ranks]
        # Every rank asks the plain model of some cases.
        everyone: list[Any] = [None] * ranks
        answers = {index: plain_answers(*group[index]) for index in range(rank, len(group), ranks)}
        dist.all_gather_object(everyone, answers)
        wanted = {index: found for part in everyone for index, found in part.items()}
        for index, (case, before) in enumerate(group):
            (folder / "running").write_text(f"{case.seed} on {ranks} ranks")
            line = run(case, before, wanted[index], folder)
            # The first engine of a process starts what stays.
            problem = None if held is None else leaks(held)
            line |= {} if (problem := agreed(problem)) is None else {"failure": problem}
            held = resources()
            if rank == 0:
                with out.open("a") as lines:
                    lines.write(json.dumps(line) + "\n")
                # Where all that it was asked went well, its sessions are there.
                if case.then is not None and line.keys() == {"seed", "ranks", "actions"}:
                    (folder / f"then-{case.then.ranks}-{case.seed}").write_text(json.dumps([case.seed, ranks]))


if __name__ == "__main__":
    with orderly_end():
        main()
