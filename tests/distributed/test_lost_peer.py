"""A rank that dies or falls silent during prefill: the others end soon, say which one it was, and nothing is left."""

import random
import re
import signal
from pathlib import Path

import pytest

from tests.distributed.launch import Launcher, run_ranks
from tests.distributed.losing import lose_rank, save_config

ABSENT = Path(__file__).parent / "ranks" / "absent.py"
# Who does not notice would wait for `timeout_s`, ten minutes; launchers' own clean-up takes up to half of this.
END_SECONDS = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's config."""
    return save_config(tmp_path)


def case(launcher: Launcher, mesh: str, victim: int, mark: pytest.MarkDecorator) -> object:
    """A parameter set."""
    return pytest.param(launcher, mesh, victim, id=f"{launcher}-{mesh}-rank{victim}", marks=mark)


@pytest.mark.parametrize(
    ("launcher", "mesh", "victim"),
    [
        case("deepspeed", "2x1", 0, pytest.mark.drawn("launchers")),
        case("torchrun", "2x1", 1, pytest.mark.drawn("launchers")),
        # 1xN sums in shared memory, where a rank that is gone is waited for without end.
        *(
            case("forked", mesh, victim, pytest.mark.drawn(1, mesh))
            for mesh, victims in (("4x1", (0, 2)), ("2x2", (0, 1)), ("1x2", (0, 1)))
            for victim in victims
        ),
        *(
            case(launcher, mesh, victim, pytest.mark.full)
            for launcher in ("deepspeed", "torchrun")
            for mesh, victims in (("4x1", (0, 2)), ("2x2", (0, 1)), ("1x4", (0, 2)), ("2x1", (0, 1)))
            for victim in victims
            if (launcher, mesh, victim) not in (("deepspeed", "2x1", 0), ("torchrun", "2x1", 1))
        ),
    ],
)
def test_killed_rank_is_named_and_all_end(folder: Path, launcher: Launcher, mesh: str, victim: int) -> None:
    judge_loss(folder, launcher, mesh, victim, "prefill")


@pytest.mark.parametrize(
    ("mesh", "victim"),
    [("4x1", 1), *(pytest.param(*case, marks=pytest.mark.full) for case in (("4x1", 0), ("4x1", 3), ("2x2", 2)))],
)
def test_killed_link_of_the_chain_is_named_and_all_end(folder: Path, mesh: str, victim: int) -> None:
    judge_loss(folder, "forked", mesh, victim, "chain")


def judge_loss(folder: Path, launcher: Launcher, mesh: str, victim: int, work: str) -> None:
    """Kill a rank in a prefill and judge what the others say."""
    loss = lose_rank(folder, mesh, victim, work, launcher=launcher, delay_s=random.random())
    result = loss.result
    assert result.returncode not in (0, None), result
    assert loss.seconds <= END_SECONDS, result
    assert result.leftovers == []
    assert loss.speakers and victim not in loss.speakers, result.stderr
    if launcher != "torchrun":
        # torchrun's agent writes a traceback of its own whenever a rank fails.
        assert "Traceback" not in result.stderr, result.stderr


def test_a_rank_that_is_gone_before_all_have_met_is_no_traceback(folder: Path) -> None:
    result = run_ranks(ABSENT, folder, ranks=2, timeout=100)
    assert result.codes[0] == 1 and "megakv: error: another rank was lost, or did not answer" in result.stderr, result
    assert "Traceback" not in result.stderr and result.leftovers == [], result


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("mesh", "work"), [("2x1", "prefill"), ("1x2", "prefill"), ("2x1", "chain")])
def test_silent_rank_is_named_after_the_time_out(folder: Path, mesh: str, work: str) -> None:
    delay_s = random.random()
    result = lose_rank(folder, mesh, 1, work, action=signal.SIGSTOP, timeout_s=3, delay_s=delay_s).result
    assert all(code not in (0, None) for code in result.codes), result
    message = (
        r"^megakv: (error: rank 0: |rank 0 ends because )rank 1 \(host \S+, pid \d+\) did not answer during .*"
        r"\(megakv\.timeout_s = 3\)"
    )
    assert re.search(message, result.stderr, re.MULTILINE), result
    assert "Traceback" not in result.stderr
    assert result.leftovers == []
