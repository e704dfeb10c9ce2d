"""The noisy neighbour of benchmarks/runahead.py takes half of the link that it is switched to, and the run tells."""

import json
import math
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from benchmarks.harness.links import SPARE_HOSTS, start_noise
from benchmarks.harness.noise import ELSEWHERE, QUIET
from tests.hosts.cluster import Hosts
from tests.hosts.rates import assert_between
from tests.unit.benchmarks.running import run_benchmark

RATE = 100e6
SHAPE = ["--layers", "2", "--hidden", "512", "--heads", "4", "--kv-heads", "4", "--intermediate", "64"]
SHAPE += ["--vocab", "300"]


@pytest.mark.drawn("links")
def test_flow_takes_half_of_the_link_that_it_is_switched_to() -> None:
    with Hosts(count=3, rate="100mbit", spare=SPARE_HOSTS) as hosts, ExitStack() as stack:
        assert hosts.hostfile.read_text().splitlines() == ["host1 slots=1", "host2 slots=1", "host3 slots=1"]
        option, switch = start_noise(hosts, "100mbit", 3, stack)
        assert option == "--switch"
        # Between ranks, and between the hosts without any.
        ranks, others = (0, 1), (3, 4)
        for state, slow in ((QUIET, None), ("0-1", ranks), ("1-2", ranks), (ELSEWHERE, others)):
            Path(switch).write_text(state)
            time.sleep(0.3)
            for way in (ranks, others):
                # A connection beside a flow of half the rate gets the other half, or more where the flow gives way.
                low, high = (0.4, 0.8) if way == slow else (0.85, math.inf)
                assert_between(low, lambda w=way: hosts.measure(*w, seconds=1).bits_per_s / RATE, high)
        assert not hosts.processes()


@pytest.mark.drawn("links")
@pytest.mark.timeout(800)
def test_losses_are_reported(tmp_path: Path) -> None:
    given = ["--ranks", "2", "--context", "256", "--rates", "50mbit", "--noise", "--family", "falcon"]
    given += ["--methods", "tsp,kvr_e,pass_q", "--repeats", "2", "--profile-seconds", "0", *SHAPE]
    kinds = ("quiet", "elsewhere", "link")
    paths = (tmp_path / f"{attempt}.json" for attempt in count())

    def loss() -> float:
        path = next(paths)
        done = run_benchmark("runahead.py", *given, "--json", path, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads(path.read_text())
        found = {(row["method"], row["noise"]): row for row in report["rows"]}
        assert list(found) == [(name, kind) for name in ("tsp", "kvr_e") for kind in kinds] + [("pass_q", "quiet")]
        losses = report["summary"]["noise_loss"]["r2-kv4-50mbit"]
        assert set(losses) == {"tsp", "kvr_e"}
        value: float = losses["tsp"]["link"]["value"]
        return value

    # Half a megabyte of keys and values each way and layer takes 84 ms of such a link: no less beside a flow.
    assert_between(0.1, loss, math.inf)
