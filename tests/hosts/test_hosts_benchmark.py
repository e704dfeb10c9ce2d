"""benchmarks/prefill.py on hosts: the rate changes from run to run, and the results say what it cost."""

import json
from pathlib import Path

import pytest

from tests.unit.benchmarks.running import run_benchmark

# Keys and values of 2 KV heads of 128: 0.26 MB of each host's 128 tokens cross the link; of the last layer, a query.
SHAPE = ["--layers", "2", "--hidden", "512", "--heads", "4", "--kv-heads", "2", "--intermediate", "64"]


@pytest.mark.drawn("links")
def test_a_slow_link_costs_what_its_bytes_take(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    given = ["--ranks", "2", "--hosts", "2", "--rates", "10mbit", "--methods", "pass_kv,tp_gloo", "--vocab", "300"]
    given += ["--context", "256", "--repeats", "2", *SHAPE]
    done = run_benchmark("prefill.py", *given, "--json", path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    rows = {(row["method"], row["rate"]): row for row in report["rows"]}
    assert list(rows) == [(method, rate) for method in ("pass_kv", "tp_gloo") for rate in ("unlimited", "10mbit")]
    sent = rows["pass_kv", "10mbit"]["bytes_sent"][0]["pass_kv"]
    assert sent == 128 * 2 * 128 * 2 * 4
    # At 1.25 MB/s; the burst makes it no less than half of that. A busy machine may be slower, never faster.
    assert min(rows["pass_kv", "10mbit"]["seconds"]) > 0.5 * sent / 1.25e6
    # An all-reduce moves as many bytes twice a layer, of rows twice as wide as keys and values together.
    assert min(rows["tp_gloo", "10mbit"]["seconds"]) > 0.5 * 4 * sent / 1.25e6
    assert rows["tp_gloo", "10mbit"]["bytes_sent"][0]["all_reduce"] >= 4 * sent
    limited, speedup = (report["summary"][name] for name in ("limited_over_unlimited", "speedup"))
    assert set(limited["10mbit"]) == {"pass_kv", "tp_gloo"}
    assert list(speedup) == [f"2 ranks, 256 tokens, {rate}" for rate in ("unlimited", "10mbit")]
    found = [*limited["10mbit"].values(), *(cell["pass_kv"]["tp_gloo"] for cell in speedup.values())]
    assert all(0 < each["low"] <= each["value"] <= each["high"] for each in found)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
