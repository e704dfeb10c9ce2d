"""A rank that dies or falls silent during prefill: the others end soon, say which one it was, and nothing is left."""

import re
import time
from pathlib import Path

import pytest

from tests.distributed.launch import Launcher, run_ranks
from tests.families import llama

SCRIPT = Path(__file__).parent / "ranks" / "prefilling.py"
# A dead process is noticed at once; the bound is that of the launcher's own clean-up, too.
END_SECONDS = 30.0
# Of no effect here: it is for peers that are alive and silent.
LONG_TIMEOUT_S = 600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model large enough that a prefill lasts: its config only."""
    config = llama(hidden_size=128, intermediate_size=256, num_hidden_layers=4, dtype="float32")
    config.save_pretrained(tmp_path)
    return tmp_path


def case(launcher: Launcher, mesh: str, victim: int, *, full: bool) -> object:
    """A parameter set."""
    name = f"{launcher}-{mesh}-rank{victim}"
    return pytest.param(launcher, mesh, victim, id=name, marks=[pytest.mark.full] if full else [])


@pytest.mark.parametrize(
    ("launcher", "mesh", "victim"),
    [
        case("deepspeed", "2x1", 0, full=False),
        case("torchrun", "2x1", 1, full=False),
        # 1xN sums in shared memory, where a rank that is gone is waited for without end.
        *(
            case("forked", mesh, victim, full=False)
            for mesh, victims in (("4x1", (0, 2)), ("2x2", (0, 1)), ("1x2", (0, 1)))
            for victim in victims
        ),
        *(
            case(launcher, mesh, victim, full=True)
            for launcher in ("deepspeed", "torchrun")
            for mesh, victims in (("4x1", (0, 2)), ("2x2", (0, 1)), ("1x4", (0, 2)), ("2x1", (0, 1)))
            for victim in victims
            if (launcher, mesh, victim) not in (("deepspeed", "2x1", 0), ("torchrun", "2x1", 1))
        ),
    ],
)
def test_killed_rank_is_named_and_all_end(folder: Path, launcher: Launcher, mesh: str, victim: int) -> None:
    lose_rank(folder, launcher, mesh, victim, "auto")


@pytest.mark.parametrize(
    ("mesh", "victim"),
    [("4x1", 1), *(pytest.param(*case, marks=pytest.mark.full) for case in (("4x1", 0), ("4x1", 3), ("2x2", 2)))],
)
def test_killed_link_of_the_chain_is_named_and_all_end(folder: Path, mesh: str, victim: int) -> None:
    lose_rank(folder, "forked", mesh, victim, "runahead")


def lose_rank(folder: Path, launcher: Launcher, mesh: str, victim: int, method: str) -> None:
    """Kill a rank in a prefill and judge what the others say."""
    cp, tp = (int(part) for part in mesh.split("x"))
    arguments = (folder, mesh, str(victim), "kill", str(LONG_TIMEOUT_S), method)
    result = run_ranks(SCRIPT, *arguments, ranks=cp * tp, timeout=180, launcher=launcher)
    ended = time.time()
    assert (folder / "lost").exists(), result
    moment, pid = (folder / "lost").read_text().split()
    assert result.returncode not in (0, None), result
    assert ended - float(moment) <= END_SECONDS, result
    assert result.leftovers == []
    survivor = (
        rf"^megakv: (error: rank (\d+): |rank (\d+) ends because ).*rank {victim} \(host \S+, pid {pid}\).* was lost"
    )
    speakers = [int(one or other) for _, one, other in re.findall(survivor, result.stderr, re.MULTILINE)]
    assert speakers and victim not in speakers, result.stderr
    if launcher != "torchrun":
        # torchrun's agent writes a traceback of its own whenever a rank fails.
        assert "Traceback" not in result.stderr, result.stderr


@pytest.mark.parametrize(("mesh", "method"), [("2x1", "auto"), ("1x2", "auto"), ("2x1", "runahead")])
def test_silent_rank_is_named_after_the_time_out(folder: Path, mesh: str, method: str) -> None:
    result = run_ranks(SCRIPT, folder, mesh, "1", "stop", "3", method, ranks=2, timeout=120)
    assert all(code not in (0, None) for code in result.codes), result
    message = (
        r"^megakv: (error: rank 0: |rank 0 ends because )rank 1 \(host \S+, pid \d+\) did not answer during .*"
        r"\(megakv\.timeout_s = 3\)"
    )
    assert re.search(message, result.stderr, re.MULTILINE), result
    assert "Traceback" not in result.stderr
    assert result.leftovers == []
