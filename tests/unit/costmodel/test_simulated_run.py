"""A simulated run is reported, drawn and traced like a real one."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from docs.generated import ROOT
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.simulation import Simulation
from megakv.launcher.command import main
from megakv.tracking.report import load_report

SIMULATE = ["simulate", "--model", str(ROOT / "recipes" / "llama3_8b"), "--layers", "3", "--hardware", "h100-rdma"]
OFFLOAD = ["--method", "offload", "--context", "60000", "--steps", "40"]


def test_waiting_is_between_computations_and_named_by_its_cause() -> None:
    played = Simulation(2)
    played.compute("dense", 0, 3.0, 0)
    played.transfer("runahead", (0, 1), 5.0, 2.0, 10, 0)
    played.compute("dense", 1, 1.0, 0)
    played.wait("runahead", 1, 5.0, 0)
    played.compute("attention", 1, 4.0, 0)
    waits = [event for event in played.events[1] if event.kind == "wait"]
    assert [(wait.name, wait.start, wait.end) for wait in waits] == [("runahead", 1.0, 5.0)]
    assert not [event for event in played.events[0] if event.kind == "wait"]
    sent, received = (played.traffic(rank) for rank in range(2))
    assert [(each.calls, each.bytes_sent) for each in (*sent, *received)] == [(1, 10), (0, 0)]
    assert [each.seconds_exposed for each in (*sent, *received)] == [0.0, 4.0]
    assert played.seconds == 9.0 and played.tasks == 4


@pytest.mark.parametrize(
    "method",
    [
        ["--method", "runahead", "--cp", "4", "--context", "9000", "--noise", "0.1", "--slow-link", "1-2:50"],
        ["--method", "pass_q", "--cp", "2", "--tp", "2", "--context", "3001", "--cached", "20000"],
        ["--method", "tp", "--tp", "4", "--context", "5000", "--slow-rank", "2:2"],
        ["--method", "offload", "--context", "50000", "--batch", "2", "--weights-too"],
    ],
)
def test_report_picture_and_trace(method: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png, trace = tmp_path / "run.json", tmp_path / "run.png", tmp_path / "trace.json"
    assert main([*SIMULATE, *method, "--json", str(out), "--png", str(png), "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    values = json.loads(shown[shown.index("{") :])
    report = load_report(out)
    assert (report.ttft_s or report.ttit_s) == values["ttft_s"] or report.ttit_s == values["ttit_s"]
    sent = {name: sum(rank.bytes_sent.get(name, 0) for rank in report.ranks) for name in values["bytes_sent"]}
    assert sent == values["bytes_sent"] and sum(sent.values()) > 0
    for rank in report.ranks:
        computed = sorted((e for e in rank.events if e.kind != "communication"), key=lambda event: event.start)
        assert all(a.end <= b.start + 1e-9 for a, b in zip(computed, computed[1:], strict=False))
    assert png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {rank.rank for rank in report.ranks}


def test_undisturbed_it_says_what_the_closed_form_says(capsys: pytest.CaptureFixture[str]) -> None:
    for method in (["--method", "pass_kv", "--cp", "4"], ["--method", "runahead", "--cp", "4"], ["--method", "tp"]):
        assert main([*SIMULATE, *method, "--context", "16384"]) == 0
        shown = capsys.readouterr().out
        values = json.loads(shown[shown.index("{") :])
        assert values["ttft_s"] == pytest.approx(values["closed_form_s"], rel=0.01)


def test_rows_beyond_host_memory_come_as_the_disk_gives_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = {}
    for name, disk in (("none", None), ("disk", 3e9)):
        machines[name] = tmp_path / f"{name}.json"
        PRESETS["h100-rdma"].model_copy(update={"disk_bandwidth": disk}).save(machines[name])

    def seconds(machine: str, *options: str) -> float:
        command = [*SIMULATE, "--hardware", str(machines[machine]), *OFFLOAD]
        assert main([*command, *options]) == 0
        shown = capsys.readouterr().out
        values = json.loads(shown[shown.index("{") :])
        assert values["ttit_s"] == pytest.approx(values["closed_form_s"], rel=0.01)
        return values["ttit_s"]

    # 4 KiB for a token in each of three layers: half of them in memory.
    rows = 3 * 60000 * 4096
    half = str(rows / 2 / (1 << 30))
    roomy, slower = seconds("none"), seconds("disk", "--host-gb", half)
    assert seconds("none", "--host-gb", "1.0") == seconds("disk", "--host-gb", "1.0") == roomy
    link_s = rows / PRESETS["h100-rdma"].host.bandwidth
    assert slower == pytest.approx(roomy + rows / 2 / 3e9 - link_s / 2, rel=0.02)
    for machine, options, message in (
        ("none", ["--host-gb", half], "0.343 GiB of host memory do not hold what is cached"),
        ("disk", ["--host-gb", "0"], "--host-gb 0: allowed: more than 0"),
        ("disk", ["--host-gb", "1", "--method", "pass_kv"], "with --method offload"),
    ):
        command = [*SIMULATE, "--hardware", str(machines[machine]), *OFFLOAD]
        assert main([*command, *options]) != 0
        assert message in capsys.readouterr().err


def test_two_runs_are_drawn_above_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = [tmp_path / "a.json", tmp_path / "b.json"]
    for report, factor in zip(reports, (1, 3), strict=True):
        command = [*SIMULATE, "--method", "pass_kv", "--cp", "2", "--context", "4000", "--slow-rank", f"1:{factor}"]
        assert main([*command, "--json", str(report)]) == 0
    both, one = tmp_path / "both.png", tmp_path / "one.png"
    assert main(["timeline", str(reports[0]), str(one)]) == 0
    assert main(["timeline", str(reports[0]), str(both), "--beside", str(reports[1])]) == 0
    assert imread(both).shape[0] == 2 * imread(one).shape[0]
    assert imread(both).shape[1] == imread(one).shape[1]
