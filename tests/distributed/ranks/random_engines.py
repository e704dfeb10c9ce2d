"""Started on every rank: engines of random cases, each asked what plain transformers is asked on one process.

Usage: random_engines.py OUT.jsonl WORK_DIR SEED[,SEED...]. A line of OUT is one case: its `seed`, how many `actions`
were compared, and perhaps with what message it was `refused` and by which `law`, what its `failure` was, or that it
ended in a `tie`. WORK_DIR/running names the case under way. Sessions that fewer ranks go on with, and their cases, are
left in WORK_DIR.

Lossy cases are compared with what one rank answers with the same losses, which a launch on one rank leaves in WORK_DIR
before: random_engines.py OUT.jsonl WORK_DIR SEED[,SEED...] RANKS. Where that differs the line has a `doubt`, and in a
launch on one rank after it, random_engines.py OUT.jsonl WORK_DIR, a line of OUT says whether it is a `tie`.
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
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries
from tests.distributed.asking import Answer, Asked, Plain, differs
from tests.distributed.drawn_engines import answers_alone, make_engine, make_model, write_files
from tests.distributed.random_cases import Action, Case, draw

RAISED = "raised "
"""What a problem begins with that is no wrong answer."""
DISTURBED = 8
"""Models with other rounding errors: what they disagree on is a tie."""
COARSE = 1e-2
"""Logits of a lossy engine that were rounded otherwise, relative to the largest, are off by at most so much."""


def plain_answers(case: Case, before: list[Action], *, noise: int = 0) -> list[Answer]:
    """What plain transformers says to each action of a case, after those of the launch before."""
    plain = Plain(make_model(case, noise))
    answers = [getattr(plain, action["do"])(action) for action in [*before, *case.script]]
    return answers[len(before) :]


def wanted_answers(case: Case, before: list[Action], folder: Path) -> list[Answer] | str:
    """What a case should say to each action; a text where one rank could not say it."""
    if not case.lossy:
        return plain_answers(case, before)
    parts: list[list[Answer] | str] = torch.load(alone_file(case, folder), weights_only=True)
    return parts[bool(before)]


def alone_file(case: Case, folder: Path) -> Path:
    """What one rank said."""
    return folder / f"alone-{case.seed}-{case.drawn_on}.pt"


def write_alone(folder: Path, seeds: list[int], ranks: int) -> None:
    """What one rank says to the lossy cases of so many ranks."""
    for case in (draw(seed, ranks) for seed in seeds):
        (folder / "running").write_text(f"{case.seed} of {ranks} ranks, on one")
        if any(part.lossy for part in case.parts):
            torch.save(answers_alone(case, folder / "alone"), alone_file(case, folder))


def judge_doubts(out: Path, folder: Path) -> None:
    """Say whether models whose weights differ by rounding errors give the answers that are in doubt."""
    for path in folder.glob("doubt-*.pt"):
        doubt = torch.load(path, weights_only=True)
        case = draw(doubt["seed"], doubt["drawn_on"])
        tie = False
        for noise in range(1, DISTURBED + 1):
            answers = answers_alone(case, folder / f"alone-{noise}", noise=noise)[doubt["part"]]
            tie |= not isinstance(answers, str) and differs(doubt["found"], answers[doubt["step"]], COARSE) is None
        with out.open("a") as lines:
            lines.write(json.dumps({"seed": case.seed, "ranks": doubt["ranks"], "tie": tie}) + "\n")
        path.unlink()


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


def outcome(case: Case, before: list[Action], step: int, found: Answer, problem: str, folder: Path) -> str:
    """What an answer is that is not what it should be: a failure, a tie, or a doubt. The same on all ranks."""
    if not problem.startswith("rank 0: ") or problem.startswith(f"rank 0: {RAISED}"):
        return "failure"
    if not case.lossy:
        return "tie" if is_tie(case, before, step, found) else "failure"
    if dist.get_rank() == 0:
        doubt = {"seed": case.seed, "drawn_on": case.drawn_on, "ranks": case.ranks, "part": int(bool(before))}
        torch.save(doubt | {"step": step, "found": found}, folder / f"doubt-{case.name}.pt")
    return "doubt"


def run_script(case: Case, before: list[Action], wanted: list[Answer], asked: Asked) -> dict[str, Any]:
    """All actions of a case on its engine, until one fails."""
    for step, (action, expected) in enumerate(zip(case.script, wanted, strict=True)):
        found: Answer = {}
        try:
            found = getattr(asked, action["do"])(action)
            problem = differs(found, expected)
        except Exception:
            problem = RAISED + "".join(traceback.format_exc().splitlines(keepends=True)[-9:])
        problem = agreed(problem)
        if problem is not None:
            kind = outcome(case, before, step, found, problem, asked.folder)
            return {"actions": step + 1, kind: f"{action}\n{problem}"}
    return {"actions": len(case.script)}


def run(case: Case, before: list[Action], wanted: list[Answer] | str, folder: Path) -> dict[str, Any]:
    """One case's line."""
    line: dict[str, Any] = {"seed": case.seed, "ranks": case.ranks}
    model, path, disk = make_model(case), folder / f"model-{case.name}", folder / f"disk-{case.name}"
    if dist.get_rank() == 0:
        write_files(case, folder)
        model.save_pretrained(path)
    dist.barrier()
    engine = make_engine(case, model if case.source == "module" else path, case.section, folder)
    if isinstance(engine, ValueError):
        return line | {"refused": str(engine), "law": getattr(engine, "law", None)}
    if isinstance(wanted, str):
        engine.destroy()
        return line | {"failure": f"one rank: {wanted}"}
    other = None if case.neighbour is None else make_engine(case, path, case.neighbour, folder)
    line |= run_script(case, before, wanted, Asked(case, folder, engine))
    if isinstance(other, ValueError):
        line |= {"refused neighbour": str(other), "law of the neighbour": getattr(other, "law", None)}
    elif other is not None:
        # It was made before the first was used, and is used after.
        stateless = [pair for pair in zip(case.script, wanted, strict=True) if pair[0]["do"] in ("forward", "generate")]
        beside = replace(case, script=[action for action, _ in stateless])
        second = run_script(beside, [], [answer for _, answer in stateless], Asked(beside, folder, other))
        line |= {f"{name} of the second engine": second[name] for name in ("tie", "failure") if name in second}
        other.destroy()
    engine.destroy()
    kept = not case.section.get("weights") and not case.section.get("offload", {}).get("weights")
    whole = case.source == "module" and case.sizes[1] == 1 and kept
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
    found = sorted(folder.glob(f"then-{ranks}-*"))
    for path in found:
        first = draw(*json.loads(path.read_text()))
        assert first.then is not None
        cases.append((first.then, first.script))
    dist.barrier()
    for path in found if dist.get_rank() == 0 else ():
        # Once: other launches on as many ranks have other cases.
        path.unlink()
    return cases


def main() -> None:
    """Entry of every rank."""
    out, folder, given = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    seeds = [int(seed) for seed in given[0].split(",")] if given else []
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    set_verbosity_error()
    # Its watch over progress bars stays, once there was one.
    tqdm(total=1, file=io.StringIO()).close()
    start_distributed(tp_only=False, timeout_s=300)
    if not given:
        judge_doubts(out, folder)
    elif len(given) > 1:
        write_alone(folder, seeds, int(given[1]))
    else:
        run_all(out, folder, seeds)


def run_all(out: Path, folder: Path, seeds: list[int]) -> None:
    """All cases of a launch, and those that go on from earlier ones."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cases, held = draw_all(folder, seeds), None
    for start in range(0, len(cases), 2 * ranks):
        group = cases[start : start + 2 * ranks]
        # Every rank asks the plain model of some cases.
        everyone: list[Any] = [None] * ranks
        answers = {index: wanted_answers(*group[index], folder) for index in range(rank, len(group), ranks)}
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
                    (folder / f"then-{case.then.ranks}-{case.then.name}").write_text(json.dumps([case.seed, ranks]))


if __name__ == "__main__":
    with orderly_end():
        main()
