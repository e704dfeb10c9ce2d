"""The helper that starts ranks: results come back, failures and time-outs too, and no process is left."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.launch import Launcher, Result, run_forked, run_ranks

SCRIPT = Path(__file__).with_name("all_reduce_ranks.py")


class Launch:
    """One launch of the script with fresh random values per rank."""

    def __init__(self, folder: Path, write_json: Callable[[str, Any], Path], ranks: int) -> None:
        self.folder, self.write_json, self.ranks = folder, write_json, ranks
        self.values = [[random.randint(-999, 999) for _ in range(5)] for _ in range(ranks)]

    def run(self, *, timeout: float = 120, launcher: Launcher = "forked", **job: Any) -> Result:
        path = self.write_json("job.json", {"values": self.values, "results": str(self.folder), **job})
        return run_ranks(SCRIPT, path, ranks=self.ranks, timeout=timeout, launcher=launcher)

    def check_results(self) -> None:
        """Every rank had the sum, and none of the processes lives."""
        expected = [float(sum(column)) for column in zip(*self.values, strict=True)]
        for rank in range(self.ranks):
            result = json.loads((self.folder / f"{rank}.json").read_text())
            assert result["total"] == expected
            assert not psutil.pid_exists(result["pid"])


@pytest.fixture
def launch(tmp_path: Path, write_json: Callable[[str, Any], Path]) -> Launch:
    return Launch(tmp_path, write_json, ranks=2)


# The others' success is what test_job.py begins with.
@pytest.mark.parametrize(
    "launcher",
    [
        "forked",
        "srun",
        "accelerate",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("deepspeed", "torchrun")),
    ],
)
def test_ranks_reduce(launch: Launch, launcher: Launcher) -> None:
    launch.run(launcher=launcher).check()
    launch.check_results()


def test_a_process_that_nobody_launched_is_a_world(
    tmp_path: Path, write_json: Callable[[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a Slurm allocation of several tasks, whose script is one process."""
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    launch = Launch(tmp_path, write_json, ranks=1)
    launch.run(launcher="python").check()
    launch.check_results()


@pytest.mark.parametrize(
    "launcher",
    ["forked", *(pytest.param(name, marks=pytest.mark.drawn("launchers")) for name in ("deepspeed", "torchrun"))],
)
def test_failure_of_one_rank_propagates(launch: Launch, launcher: Launcher) -> None:
    result = launch.run(launcher=launcher, then="fail", odd_rank=1)
    assert result.returncode not in (0, None)
    assert "rank failed on purpose" in result.stderr
    assert result.leftovers == []
    launch.check_results()


# Long enough for the ranks to get to where they stay.
@pytest.mark.parametrize(("launcher", "limit"), [pytest.param("torchrun", 20, marks=pytest.mark.full), ("forked", 12)])
def test_time_out_kills_every_rank(launch: Launch, launcher: Launcher, limit: int) -> None:
    result = launch.run(timeout=limit, launcher=launcher, then="hang", odd_rank=0)
    assert result.returncode is None
    assert limit <= result.seconds
    launch.check_results()


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.full), "forked"])
def test_process_left_behind_is_reported_and_killed(launch: Launch, launcher: Launcher) -> None:
    result = launch.run(launcher=launcher, then="leave", odd_rank=1)
    assert result.returncode == 0
    assert len(result.leftovers) == 1 and "time.sleep(1000)" in result.leftovers[0]
    assert not psutil.pid_exists(int(result.leftovers[0].split(":")[0]))
    with pytest.raises(AssertionError, match="left over"):
        result.check()


def test_forked_ranks_have_arguments_of_their_own(launch: Launch) -> None:
    jobs = [{"values": launch.values, "results": str(launch.folder)} for _ in range(2)]
    jobs[1] |= {"then": "fail", "odd_rank": 1}
    paths = [launch.write_json(f"job{rank}.json", job) for rank, job in enumerate(jobs)]
    result = run_forked(SCRIPT, [[path] for path in paths], timeout=60)
    assert result.codes == (0, 3) and result.returncode == 3
    launch.check_results()
