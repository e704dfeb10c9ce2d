"""Saves that are killed at every step and at random moments, and two jobs that save to one folder.

Usage: killed_saves.py OUT.json WORK_DIR MOMENTS, with so many random moments. The one rank forks a process for each
save; each is a world of its own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from families import llama
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.launcher.process import leave, orderly_end, quiet_libraries

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
LENGTHS = (40, 90)
STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "fcntl.flock")


def engine_alone() -> Any:
    """An engine in a world of this process alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(), dtype=torch.float32).eval()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return megakv.init_inference(model, {"dtype": "fp32"})


def talk(engine: Any, length: int) -> Any:
    """A conversation that its length tells from the other."""
    session = engine.session()
    ids = torch.randint(3, 120, (1, length), generator=torch.Generator().manual_seed(length))
    session.generate(ids, max_new_tokens=2, **GREEDY)
    return session


def forked(action: Callable[[], None]) -> int:
    """The process id of a child that does something and ends."""
    if child := os.fork():
        return child
    try:
        action()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave(0)


def ended(child: int) -> int:
    """A child's exit status; the negative number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(step: int, below: str) -> None:
    """Kill this process at its so-manieth step with files below a folder."""
    left = [step]

    def seen(event: str, args: tuple[Any, ...]) -> None:
        if event in STEPS and (event == "fcntl.flock" or str(args[0]).startswith(below)):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(seen)


def save(folder: Path, length: int, step: int | None = None) -> None:
    """Save a conversation, and perhaps die on the way."""
    session = talk(engine_alone(), length)
    if step is not None:
        die_at(step, str(folder))
    session.save(folder)


def save_often(folder: Path, ready: int, times: int | None) -> None:
    """Save both conversations in turn, so many times or until killed."""
    engine = engine_alone()
    sessions = [talk(engine, length) for length in LENGTHS]
    os.write(ready, b".")
    for turn in count() if times is None else range(times):
        sessions[turn % 2].save(folder)


def main() -> None:
    """Entry of the one rank."""
    out, work, moments = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    results: dict[str, Any] = {"killed": [], "copies": []}
    copies: list[Path] = []

    def keep(folder: Path) -> None:
        # Looked at when nothing is forked any more: an engine's threads would be missing in a child.
        copies.append(Path(shutil.copytree(folder, work / f"copy{len(copies)}")))

    folder = work / "stepwise"
    assert ended(forked(lambda: save(folder, LENGTHS[0]))) == 0
    for step in count():
        # Now onto one, now onto the other; each finds what the one before left behind.
        code = ended(forked(lambda step=step: save(folder, LENGTHS[(step + 1) % 2], step)))
        keep(folder)
        if code == 0:
            break
        results["killed"].append(code)
    results["clean"] = len(list(folder.iterdir()))
    for _ in range(moments):
        reading, ready = os.pipe()
        child = forked(lambda ready=ready: save_often(folder, ready, None))
        os.read(reading, 1)
        time.sleep(random.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        results["killed"].append(ended(child))
        keep(folder)
    both = work / "both"
    reading, ready = os.pipe()
    children = [forked(lambda: save_often(both, ready, 20)) for _ in range(2)]
    results["both"] = [ended(child) for child in children]
    results["both left"] = sorted(path.name.split("-")[0] for path in both.iterdir())
    keep(both)
    engine = engine_alone()
    ids = torch.randint(3, 120, (1, 3))
    answers = {}
    for length in LENGTHS:
        session = talk(engine, length)
        answers[session.length] = session.fork().generate(ids, max_new_tokens=3, **GREEDY)
    for copy in copies:
        session = engine.restore_session(copy)
        length = session.length
        results["copies"].append(torch.equal(session.generate(ids, max_new_tokens=3, **GREEDY), answers[length]))
    engine.destroy()
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
