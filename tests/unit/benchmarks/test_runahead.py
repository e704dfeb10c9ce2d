"""benchmarks/runahead.py: a tiny real run, and verdicts on samples whose truth is known."""

import argparse
import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.charts import draw_charts
from benchmarks.harness.runahead.plan import METHODS, Group, groups
from benchmarks.harness.runahead.report import charts, losses, show_cases, summarise
from tests.unit.benchmarks.running import fork_benchmark, refusal, tiny

fork = partial(fork_benchmark, "runahead.py")
TINY = tiny()
QUICK = ["--table-spacing", "64", "--repeats", "2", "--profile-seconds", "0.3", "--search-step", "32"]
QUICK += ["--search-patience", "1"]


@pytest.mark.drawn("benchmarks")
def test_tiny_run_of_all_methods(tmp_path: Path) -> None:
    path = tmp_path / "runahead.json"
    done = fork("--ranks", "2", "--context", "64,96", *QUICK, "--json", path, *TINY, timeout=300)
    assert done.returncode == 0 and "r2-kv2-free" in done.stdout, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert set(report) == {"benchmark", "machine", "versions", "args", "rows", "summary"}
    assert report["benchmark"] == "runahead" and report["args"]["kv_heads"] == [2]
    names = METHODS
    found = {(row["context"], row["method"]): row for row in report["rows"]}
    # Predicted are only lengths between those of the table.
    assert set(found) == {(64, name) for name in names if name != "kvr_p"} | {(96, name) for name in names}
    for (context, name), row in found.items():
        assert (row["ranks"], row["kv_heads"], row["rate"], row["noise"]) == (2, 2, "free", "quiet")
        assert len(row["seconds"]) == 2 and all(value > 0 for value in row["seconds"])
        if row["auto"] != "tensor":
            assert row["predicted_s"] is None if name.startswith("tp") else 0 < row["predicted_s"] < math.inf
        assert row["max_logit_difference"] <= 1e-5
        sent = {operation: 0 for rank in row["bytes_sent"] for operation in rank}
        for rank in row["bytes_sent"]:
            for operation, count in rank.items():
                sent[operation] += count
        row_bytes = 2 * 2 * 2 * 16 * 4
        if name in ("tsp", "tsp_causal"):
            # Equations 4 and 5: (p - 1) C.
            assert sent["all_gather"] == context * row_bytes
        if name.startswith("kvr") or name == "one_rank":
            assert sum(row["partition"]) == context and len(row["partition"]) == 2
            # Equations 6 and 7: what is in front of the last rank, in the first of two layers. In the other, a query.
            expected = 0 if name == "one_rank" else row["partition"][0] * row_bytes // 2
            assert sent.get("runahead", 0) == expected
            assert (sent.get("pass_q", 0) > 0) == (expected > 0)
        if name == "kvr_e":
            assert row["partition"] == [context / 2] * 2
        ways = "one_rank", "tensor", "runahead", "pass_kv", "pass_q"
        assert (row["auto"] in ways) == (name == "auto")

    summary = report["summary"]
    cell = summary["cells"]["r2-kv2-free-96"]
    middle = {name: np.array(found[96, name]["seconds"]) for name in names}
    for peer in ("tsp", "tsp_causal", "tp_gloo", "tp", "pass_kv"):
        value = cell["speedup"][f"kvr_s/{peer}"]
        assert value["value"] == pytest.approx(np.median(middle[peer] / middle["kvr_s"]))
        assert 0 < value["low"] <= value["value"] <= value["high"] < math.inf
    assert cell["time_ratio"]["kvr_p/kvr_s"]["value"] == pytest.approx(np.median(middle["kvr_p"] / middle["kvr_s"]))
    assert cell["auto"]["regret"]["value"] >= 0 and summary["auto_regret"]["largest"]["cell"] in summary["cells"]
    assert path.with_suffix(".ttft.r2-kv2-free.png").read_bytes().startswith(b"\x89PNG")
    assert "Time to first token" in done.stdout and "What auto chose" in done.stdout


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--ranks", "1"], "--sizes 1"),
        (["--ranks", "2", "--sizes", "2,4"], "--sizes 2,4"),
        (["--ranks", "2", "--methods", "tsp,kvr"], "--methods tsp,kvr"),
        (["--ranks", "2", "--context", "4"], "--context 4"),
        (["--ranks", "2", "--kv-heads", "3"], "--kv-heads 3"),
        (["--ranks", "2", "--rates", "free,fast"], "fast"),
        (["--ranks", "2", "--noise"], "--noise needs limited links"),
    ],
)
def test_impossible_arguments_are_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("runahead.py", argv)


def test_plan_leaves_out_what_a_group_cannot_do() -> None:
    group = Group(4, 2, "1gbit", (1000, 4096, 5000))
    assert {"tp", "tp_gloo", "kvr_p"}.isdisjoint(group.methods(METHODS, 4096, 4096))
    assert "kvr_p" in group.methods(METHODS, 5000, 4096) and "kvr_p" not in group.methods(METHODS, 1000, 4096)
    assert [group.searched(["tsp", "kvr_s"], 4096, context) for context in group.contexts] == [[1000], [4096], [5000]]
    assert [group.searched(["tsp", "kvr_p"], 4096, context) for context in (4096, 5000)] == [[], [4096, 8192]]
    assert group.searched(["tsp", "pass_kv"], 4096, 5000) == []
    assert "tp" in Group(4, 4, "free", (9,)).methods(METHODS, 9, 4096)
    asked = argparse.Namespace(rates=["1gbit", "free"], kv_heads=[1, 16], sizes=[2, 4], context=[512], noise=True)
    names = [(each.name, each.noise) for each in groups(asked)]
    assert names[:2] == [("r2-kv16-free", False), ("r4-kv16-free", False)] and names[-1] == ("r4-kv1-1gbit", True)


def row(method: str, seconds: list[float], *, noise: str = "quiet", **given: Any) -> dict[str, Any]:
    place = {"ranks": 4, "kv_heads": 16, "rate": "free", "context": 8192}
    facts = {"max_logit_difference": 1e-6, "partition": None, "auto": None, "candidates_s": None}
    return {"method": method, "seconds": seconds, "noise": noise, **place, **facts, **given}


def noisy(seconds: float, rounds: int = 9) -> list[float]:
    return list(seconds * np.random.default_rng(random.getrandbits(32)).uniform(0.998, 1.002, rounds))


TIMES = {
    "tsp": 1.5,
    "tsp_causal": 1.3,
    "tp_gloo": 1.25,
    "kvr_e": 1.2,
    "kvr_s": 1.0,
    "pass_kv": 1.02,
}


def test_verdicts_on_known_times() -> None:
    rows = [row(name, noisy(seconds), partition=[3000, 2000, 1700, 1492]) for name, seconds in TIMES.items()]
    rows.append(row("kvr_p", noisy(1.01), partition=[2900, 2100, 1700, 1492]))
    candidates = {"single": 3.0, "runahead": 1.1, "pass_kv": 1.02}
    rows.append(row("auto", noisy(1.02), auto="pass_kv", candidates_s=candidates))
    rows += [row("tsp", noisy(5.0), rate="1gbit"), row("kvr_s", noisy(2.0), rate="1gbit")]
    summary = summarise(rows)
    assert list(summary["cells"]) == ["r4-kv16-free-8192", "r4-kv16-1gbit-8192"]
    cell, slow = summary["cells"].values()
    for peer, expected in (("tsp", 1.5), ("tsp_causal", 1.3), ("tp_gloo", 1.25), ("kvr_e", 1.2), ("pass_kv", 1.02)):
        assert cell["speedup"][f"kvr_s/{peer}"]["value"] == pytest.approx(expected, rel=0.005)
    assert cell["time_ratio"]["kvr_p/kvr_s"]["value"] == pytest.approx(1.01, rel=0.005)
    assert cell["auto"]["chose"] == "pass_kv"
    assert cell["auto"]["regret"]["value"] == pytest.approx(0.02, abs=0.004)
    assert cell["auto"]["predicted_over_measured"] == {
        "runahead": pytest.approx(1.1, rel=0.005), "pass_kv": pytest.approx(1.0, rel=0.005)
    }  # fmt: skip
    assert summary["auto_regret"]["largest"]["cell"] == "r4-kv16-free-8192"
    assert slow["speedup"]["kvr_s/tsp"]["value"] == pytest.approx(2.5, rel=0.005) and "auto" not in slow
    assert summary["noise_loss"] == {}


def test_losses_tell_the_link_from_the_processor() -> None:
    rounds = np.linspace(1, 2, 7)  # a machine that becomes slower
    times = {"kvr_s": 1.0, "kvr_s, elsewhere": 1.05, "kvr_s, link": 1.08, "tsp": 2.0, "tsp, link": 2.4}
    found = losses({name: list(rounds * seconds) for name, seconds in times.items()})
    assert {kind: round(value["value"], 6) for kind, value in found["kvr_s"].items()} == {
        "elsewhere": 0.05, "link": 0.08, "link_alone": round(1.08 / 1.05 - 1, 6)
    }  # fmt: skip
    assert found["tsp"]["link"]["value"] == pytest.approx(0.2) and set(found["tsp"]) == {"link"}
    rows = []
    for context, loss in ((4096, 0.1), (8192, 0.3)):
        given = {"rate": "1gbit", "context": context}
        rows += [row("tsp", noisy(1.0), **given), row("tsp", noisy(1 + loss), noise="link", **given)]
    mean = summarise(rows)["noise_loss"]["r4-kv16-1gbit"]["tsp"]["link"]
    assert mean["value"] == pytest.approx(0.2, abs=0.005) and mean["low"] < mean["value"] < mean["high"] < 0.21


def test_tables_and_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for ranks in (2, 4):
        for context in (4096, 8192):
            for name, seconds in {**TIMES, "kvr_p": 1.01, "one_rank": 3.5}.items():
                place = {"ranks": ranks, "context": context, "partition": [context // ranks] * ranks}
                rows.append(row(name, noisy(seconds * context / ranks), **place))
    slow = {"rate": "1gbit", "ranks": 2, "context": 4096, "partition": [2048, 2048]}
    rows += [row("one_rank", [3.5 * 2048], **slow), row("kvr_s", [5.0 * 2048], **slow)]
    rows += [row("kvr_s", [5.5 * 2048], noise="link", **slow)]
    summary = summarise(rows)
    show_cases(rows, summary)
    header, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()[2:]
    # Tables 1 and 2, and Table 3: TSP and one rank beside the chain, by links, ranks and tokens.
    assert header.split()[:4] == ["rate", "kv_heads", "ranks", "context"]
    assert {"ttft_s.tsp.value", "ttft_s.kvr_s.value", "ttft_s.one_rank.value"} <= set(header.split())
    assert len(lines) == 5
    arguments = argparse.Namespace(
        family="llama", layers=8, hidden=1024, heads=16, kv_heads=[16], dtype="fp32", threads=1
    )
    drawn = draw_charts(tmp_path / "x.json", charts(arguments, summary))
    kinds = {file.name.split(".")[1] for file in drawn}
    assert kinds == {"ttft", "pass_kv"}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in drawn) and len(set(drawn)) == len(drawn)
