"""The noisy neighbour of benchmarks/runahead.py takes half of the link that it is switched to, and the run tells."""

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness.neighbours import SPARE_HOSTS, NoisyLinks
from benchmarks.harness.noise import ELSEWHERE, QUIET
from tests.hosts.cluster import Hosts
from tests.unit.benchmarks.running import run_benchmark

RATE = 100e6
SHAPE = ["--layers", "2", "--hidden", "512", "--heads", "4", "--kv-heads", "4", "--intermediate", "64"]
SHAPE += ["--vocab", "300"]


def test_flow_takes_half_of_the_link_that_it_is_switched_to() -> None:
    with Hosts(count=3, rate="100mbit", spare=SPARE_HOSTS) as hosts, ExitStack() as stack:
        assert hosts.hostfile.read_text().splitlines() == ["host1 slots=1", "host2 slots=1", "host3 slots=1"]
        option, switch = NoisyLinks("100mbit").accompany(hosts, 3, stack)
        assert option == "--switch"
        found = {}
        for state in (QUIET, "0-1", "1-2", ELSEWHERE):
            Path(switch).write_text(state)
            time.sleep(0.3)
            # Between ranks, and between the hosts without any.
            found[state] = [hosts.measure(*way, seconds=1).bits_per_s / RATE for way in ((0, 1), (3, 4))]
        assert not hosts.processes()
    # A connection beside a flow of half the rate gets the other half, or more where the flow gives way.
    slow = [found["0-1"][0], found["1-2"][0], found[ELSEWHERE][1]]
    free = [*found[QUIET], found["0-1"][1], found["1-2"][1], found[ELSEWHERE][0]]
    assert all(0.4 < share < 0.8 for share in slow) and min(free) > 0.85, found


@pytest.mark.timeout(300)
def test_losses_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "runahead.json"
    given = ["--ranks", "2", "--context", "256", "--rates", "50mbit", "--noise", "--family", "falcon"]
    done = run_benchmark(
        "runahead.py", *given, "--methods", "tsp,kvr_e,pass_q", "--repeats", "3", "--json", path, *SHAPE, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    found = {(row["method"], row["noise"]): row for row in report["rows"]}
    kinds = ("quiet", "elsewhere", "link")
    assert list(found) == [(name, kind) for name in ("tsp", "kvr_e") for kind in kinds] + [("pass_q", "quiet")]
    losses = report["summary"]["noise_loss"]["r2-kv4-50mbit"]
    assert set(losses) == {"tsp", "kvr_e"}
    # Half a megabyte of keys and values each way and layer takes 84 ms of such a link: no less beside a flow.
    assert losses["tsp"]["link"]["value"] > 0.1
    assert path.with_suffix(".noise.r2-kv4-50mbit.png").read_bytes().startswith(b"\x89PNG")
