"""A recipe's run script with a hostfile: ranks on two hosts."""

from pathlib import Path

import pytest

from tests.distributed.test_recipe import check_outcome, make_checkout, words_of_a_run
from tests.hosts.cluster import Hosts


@pytest.mark.full
def test_ranks_on_two_hosts(tmp_path: Path) -> None:
    script = make_checkout(tmp_path / "checkout")
    with Hosts(count=2) as hosts:
        words = ["bash", str(script), "--hostfile", str(hosts.hostfile), *words_of_a_run(tmp_path)]
        hosts.run(words, timeout=240).check()
    assert [rank["host"] for rank in check_outcome(tmp_path)["ranks"]] == ["host1", "host2"]
