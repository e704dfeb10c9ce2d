"""A recipe's run script, and so ``megakv run``, with a hostfile: ranks on two hosts, which end with the command."""

import json
import time
from pathlib import Path

import pytest

from tests.distributed.launch import GRACE_S
from tests.distributed.test_recipe import check_outcome, make_checkout, words_of_a_run
from tests.hosts.cluster import Hosts
from tests.patience import Patience

START_S = 240
QUESTION = 'what costs $5, `ls`, 100%h and "this"?'
"""A remote shell and pdsh would make something else of it."""


@pytest.mark.full
def test_ranks_on_two_hosts(tmp_path: Path) -> None:
    script = make_checkout(tmp_path / "checkout")
    with Hosts(count=2) as hosts:
        words = ["bash", str(script), "--hostfile", str(hosts.hostfile), *words_of_a_run(tmp_path)]
        hosts.run([*words, "--question", QUESTION], timeout=START_S).check()
        running = hosts.start([*words, "--max-new-tokens", "400"])
        patience = Patience(START_S)
        while "tokens on CP 2" not in running.stdout:
            assert not running.ended() and not patience.over, running.wait(0)
            time.sleep(0.05)
        command = next(process for process in hosts.processes(0) if "run" in process.cmdline())
        command.kill()
        patience = Patience(4 * GRACE_S)
        while (left := hosts.processes()) and not patience.over:
            time.sleep(0.1)
        assert not left, [process.cmdline() for process in left]
    outcome = json.loads((tmp_path / "out.json").read_text())
    assert outcome["answers"][0]["question"] == QUESTION
    assert [rank["host"] for rank in check_outcome(tmp_path, 53 + len(QUESTION.split()))["ranks"]] == ["host1", "host2"]
