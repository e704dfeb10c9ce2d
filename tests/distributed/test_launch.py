"""The helper that starts ranks: results come back, failures and time-outs too, and no process is left."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.launch import Launcher, Result, run_ranks

SCRIPT = Path(__file__).with_name("all_reduce_ranks.py")


class Launch:
    """One launch of the script with fresh random values per rank."""

    def __init__(self, folder: Path, write_json: Callable[[str, Any], Path], ranks: int) -> None:
        self.folder, self.write_json, self.ranks = folder, write_json, ranks
        self.values = [[random.randint(-999, 999) for _ in range(5)] for _ in range(ranks)]

    def run(self, *, timeout: float = 120, launcher: Launcher = "deepspeed", **job: Any) -> Result:
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


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_ranks_reduce(launch: Launch, launcher: Launcher) -> None:
    launch.run(launcher=launcher).check()
    launch.check_results()


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_failure_of_one_rank_propagates(launch: Launch, launcher: Launcher) -> None:
    result = launch.run(launcher=launcher, then="fail", odd_rank=1)
    assert result.returncode not in (0, None)
    assert "rank failed on purpose" in result.stderr
    assert result.leftovers == []
    launch.check_results()


def test_time_out_kills_every_rank(launch: Launch) -> None:
    result = launch.run(timeout=15, launcher="torchrun", then="hang", odd_rank=0)
    assert result.returncode is None
    assert 15 <= result.seconds < 20
    launch.check_results()


def test_process_left_behind_is_reported_and_killed(launch: Launch) -> None:
    result = launch.run(launcher="torchrun", then="leave", odd_rank=1)
    assert result.returncode == 0
    assert len(result.leftovers) == 1 and "time.sleep(1000)" in result.leftovers[0]
    assert not psutil.pid_exists(int(result.leftovers[0].split(":")[0]))
    with pytest.raises(AssertionError, match="left over"):
        result.check()
