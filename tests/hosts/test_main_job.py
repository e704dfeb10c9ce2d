"""The main job across two hosts on a 1 Gbit/s link."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import ROOT
from tests.hosts.cluster import Hosts
from tests.patience import Patience

ASK = ROOT / "recipes" / "passkey" / "ask.py"
LAUNCH_S = 240


def config(slots: int) -> Path:
    """CP across the hosts, TP inside each."""
    return ASK.parent / f"cp2_tp{slots}.json"


@pytest.mark.drawn("hosts")
@pytest.mark.parametrize("parallelism", ["context", "tensor"])
def test_main_job_across_two_hosts(
    parallelism: str, slots: int, tmp_path: Path, write_json: Callable[[str, Any], Path]
) -> None:
    path = tmp_path / "outcome.json"
    asked: list[str | Path] = ["--config", config(slots)]
    if parallelism == "tensor":
        # DeepSpeed's shared-memory sum is for one host; started on two it would crash.
        settings = write_json("tp2.json", {"dtype": "fp32", "tensor_parallel": {"tp_size": 2}})
        asked, slots = ["--config", settings, "--tokens", "300"], 1
    with Hosts(count=2, slots=slots, rate="1gbit") as hosts:
        hosts.run_deepspeed(ASK, *asked, "--compare", "--json", path, timeout=LAUNCH_S).check()
    outcome = json.loads(path.read_text())
    assert outcome["tokens_equal"] is True, outcome
    # TP groups, ranks next to each other, are on one host each where they fit there.
    assert [rank["host"] for rank in outcome["ranks"]] == ["host1"] * slots + ["host2"] * slots
    if parallelism == "tensor":
        assert outcome["mesh"] == {"cp": 1, "tp": 2}
    else:
        assert outcome["answers"][0]["correct"] is True and outcome["mesh"] == {"cp": 2, "tp": slots}, outcome


@pytest.mark.drawn("hosts")
def test_a_rank_killed_on_the_other_host_ends_the_job_and_is_named(slots: int) -> None:
    with Hosts(count=2, slots=slots, rate="1gbit") as hosts:
        running = hosts.start_deepspeed(ASK, "--config", config(slots), "--tokens", "12000")
        patience = Patience(LAUNCH_S)
        while "tokens on CP 2" not in running.stdout:
            assert not running.ended() and not patience.over, running.wait(0)
            time.sleep(0.05)
        victim = 2 * slots - 1
        ranks = [process for process in hosts.processes(1) if process.environ().get("RANK") == str(victim)]
        assert len(ranks) == 1
        ranks[0].kill()
        result = running.wait(60)
        assert result.returncode not in (0, None) and result.leftovers == []
    # Seen from the first host, where the process itself cannot be looked for.
    seen = [line for line in result.stderr.splitlines() if re.search(r"megakv: (error: )?rank [01]\b", line)]
    # A survivor on the other host has said so and ended, and may be missed as early as the one that was killed.
    assert any(f"rank {victim} (host host2" in line for line in seen), result.stderr
