"""A rank is killed at a random moment of whatever ranks do: the others say so once and end, and nothing is damaged."""

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.losing import SCRIPT, Loss, lose_rank, save_config

# Who does not notice would wait for `timeout_s`, ten minutes; a busy machine takes its time to end processes.
END_SECONDS = 60.0
AT_ONCE = 2
"""Sets of ranks: while one ends, another starts. More would keep each other from starting: all work until the end."""
MOMENTS = (
    ("prefill", "2x1"),
    ("save", "2x1"),
    ("chain", "3x1"),
    ("decode", "1x2"),
    ("disk save", "2x1"),
    ("offload stream", "2x1"),
    ("chain", "2x1"),
    ("decode", "2x1"),
    ("save", "3x1"),
    ("disk", "2x1"),
    ("prefill", "1x2"),
    ("offload chunked", "2x1"),
    ("decode pass_q", "3x1"),
    ("save", "2x1"),
    ("offload cpu_rank", "2x1"),
)
"""Work and meshes, taken in turn."""
QUICK, FULL = len(MOMENTS), 300


@dataclass(frozen=True)
class Kill:
    """One launch to lose a rank of."""

    number: int
    work: str
    mesh: str
    victim: int
    delay_s: float

    @property
    def folder(self) -> str:
        """Where it works."""
        return f"{self.number}-{self.work.replace(' ', '-')}-{self.mesh}"


def draw(count: int) -> Iterator[Kill]:
    """That many kills, each at a moment of its own."""
    for number, (work, mesh) in enumerate(islice(cycle(MOMENTS), count)):
        cp, tp = (int(part) for part in mesh.split("x"))
        yield Kill(number, work, mesh, random.randrange(cp * tp), random.random())


@pytest.mark.timeout(3600)
def test_others_end_with_one_message_and_no_session_is_damaged(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    kills = list(draw(pytestconfig.getoption("--cases") or (FULL if pytestconfig.getoption("--full") else QUICK)))

    def lose(kill: Kill) -> Loss:
        folder = tmp_path / kill.folder
        (folder / "disk").mkdir(parents=True)
        return lose_rank(save_config(folder), kill.mesh, kill.victim, kill.work, delay_s=kill.delay_s)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        losses = list(pool.map(lose, kills))
    problems = {kill: found for kill, loss in zip(kills, losses, strict=True) if (found := judge(kill, loss))}
    assert not problems, "\n".join(f"{kill}: {found}" for kill, found in problems.items())
    left = [path for kill in kills for path in (tmp_path / kill.folder / "disk").iterdir()]
    assert not left
    judge_sessions(tmp_path, [kill for kill in kills if "save" in kill.work])


def judge(kill: Kill, loss: Loss) -> list[str]:
    """What went otherwise than it should."""
    result, survivors = loss.result, len(loss.result.codes) - 1
    others = [code for rank, code in enumerate(result.codes) if rank != kill.victim]
    checks = {
        f"{loss.seconds:.1f} s": loss.seconds <= END_SECONDS,
        f"exit statuses {result.codes}": all(code not in (0, None) for code in others),
        f"left over: {result.leftovers}": not result.leftovers,
        "nobody named the lost rank": bool(loss.speakers),
        "a rank spoke twice": len(set(loss.speakers)) == len(loss.speakers) and kill.victim not in loss.speakers,
        "another message": len(loss.said) == len(loss.speakers) <= survivors,
        "a traceback": not re.search("Traceback|terminate called|Fatal", result.stderr),
    }
    found = [name for name, right in checks.items() if not right]
    return [*found, result.stderr] if found else []


def judge_sessions(folder: Path, kills: list[Kill]) -> None:
    """Whatever was saved last is there, whole: the turn before the end, or the one at which it came."""
    save_config(folder)
    names = [str(folder / kill.folder) for kill in kills]
    (folder / "sessions.json").write_text(json.dumps(names))
    run_ranks(SCRIPT, folder, "1x1", "restore", "600", ranks=1, timeout=120).check()
    assert json.loads((folder / "restored.json").read_text()) == dict.fromkeys(names, True)
