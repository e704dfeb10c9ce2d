"""W&B keeps state in the process, so what really starts it runs in a child process."""

import csv
import json
import logging
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import megakv
from megakv.base.errors import MegaKVError
from megakv.tracking.config import TrackingConfig, WandbTrackingConfig
from megakv.tracking.report import Answer, RunReport, load_report, report_to_json
from megakv.tracking.tracker import Tracker
from megakv.tracking.wandb_run import WandbRun
from tests.unit.tracking.reports import random_report

REPOSITORY = Path(megakv.__file__).parents[1]


def run_child(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder` as a user who is not logged in to W&B."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env |= {
        "PYTHONPATH": str(REPOSITORY), "NETRC": str(folder / "netrc"), "OMP_NUM_THREADS": "1",
        "WANDB_CONFIG_DIR": str(folder / "config"), "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data"),
    }  # fmt: skip
    command = [sys.executable, "-c", script, *arguments]
    child = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert child.returncode == 0, child.stdout + child.stderr
    return child


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


SECRET = "what the user asks"
WANDB_SCRIPT = """
import os, sys, wandb
from megakv.tracking.config import TrackingConfig
from megakv.tracking.report import load_report
from megakv.tracking.tracker import Tracker, log_runs
before = dict(os.environ)
users = wandb.init(mode="offline", project="of-the-user", settings=wandb.Settings(silent=True))
config = TrackingConfig(wandb={"enabled": True, "name": "the-name", "group": "the-group"}, json="out/report.json")
tracker = Tracker(config, {"megakv": {"tracking": config.model_dump(by_alias=True)}, "marker": "c0ffee"}, 0)
other = Tracker(config, {}, 0)
assert other.wandb_directory != tracker.wandb_directory, "two engines, two runs"
tracker.log({"loss/first": 1.5, "speed": 12.25}, 0)
tracker.log({"loss/first": 2.75}, 1)
report = load_report(sys.argv[1])
tracker.log_report(report)
report.generated_s = report.ttft_s = 77.125
tracker.log_report(report)
assert wandb.run is users, "the user's own run is left alone"
print(log_runs([("one", load_report(sys.argv[1])), ("two", load_report(sys.argv[1]))], config.wandb))
print(tracker.wandb_upload)
print(tracker.wandb_directory)
tracker.close()
tracker.close()
other.close()
tracker.log({"late": 1.0}, 2)
users.log({"still": 1})
users.finish()
assert os.environ.get("WANDB_MODE") == before.get("WANDB_MODE"), "offline without writing to the environment"
"""


def test_real_wandb_offline(report, tmp_path):
    pytest.importorskip("wandb")
    told = Answer(question=SECRET, answer=SECRET, ttft_s=0.375, step_s=[0.25, 0.5, 0.75])
    report.answers = [told, Answer(question=SECRET, answer=SECRET)]
    report.settings = {"question": [SECRET], "max_new_tokens": 8191}
    (tmp_path / "given.json").write_text(report_to_json(report))
    child = run_child(WANDB_SCRIPT, tmp_path, "given.json", SECRET)
    *_, several, upload, directory = child.stdout.strip().splitlines()
    several, directory = Path(several), Path(directory)
    assert upload == f"wandb sync {directory}"
    assert directory.parent == tmp_path / "wandb" and directory.name.startswith("offline-run-")
    assert "wandb:" not in child.stderr, child.stderr
    [log] = directory.glob("run-*.wandb")
    content = log.read_bytes()
    for expected in (b"the-name", b"the-group", b"c0ffee", b"loss/first", b"2.75", b"12.25", b"ttft_s", b"ttit_s/p99"):
        assert expected in content, expected
    assert b"77.125" in content, "a second report is not of a step that is over"
    assert b"8191" in content and b'"cores":4' in content and b"some/tiny-llama" in content
    assert SECRET.encode() not in content
    table, _ = directory.glob("files/media/table/answers_*.json")
    data = json.loads(table.read_text())
    assert data["columns"] == [
        "answer",
        *"prompt_tokens cached_tokens new_tokens ttft_s ttit_s ttit_s/p50 ttit_s/p90 ttit_s/p99".split(),
    ]
    assert [row[0] for row in data["data"]] == [1, 2] and data["data"][0][6] == 0.5
    picture, _ = directory.glob("files/media/images/timeline_*.png")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    table, _ = directory.glob("files/media/table/communication_*.json")
    data = json.loads(table.read_text())
    assert data["columns"][:3] == ["operation", "calls", "bytes_sent"]
    expected = sum(traffic.bytes_sent for rank in report.ranks for traffic in rank.traffic)
    assert expected and sum(row[2] for row in data["data"]) == expected
    [table] = several.glob("files/media/table/comparison_*.json")
    data = json.loads(table.read_text())
    assert data["columns"] == ["metric", "one", "two", "two / one"] and data["data"][0][1] == report.scalars()["ttft_s"]
    assert len(list(several.glob("files/media/images/*/timeline_*.png"))) == 2
    assert load_report(tmp_path / "out" / "report.json") == replace(report, generated_s=77.125, ttft_s=77.125)


def track(report: RunReport, *, lose_disk: bool = False) -> None:
    """Log to CSV, JSON and a picture in this folder."""
    files = {"json": "out/report.json", "timeline": "out/picture.png"}
    tracker = Tracker(TrackingConfig(csv={"enabled": True, "job_name": "job"}, **files), {}, 0)
    assert tracker.wandb_directory is None
    tracker.log({"speed of light": 3.5, "loss/first": 1.0}, 4)
    tracker.log({"loss/first": 0.5}, 5)
    tracker.log_report(report)
    if lose_disk:
        shutil.rmtree("runs/job")
        for step in range(6, 9):
            tracker.log({"loss/first": 0.25}, step)
    tracker.close()


def test_csv_json_and_picture_without_wandb(random_source, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    report = random_report(random_source, cp=3, tp=1)
    track(report)
    job = tmp_path / "runs" / "job"
    assert rows(job / "loss_first.csv") == [["step", "first"], ["4", "1.0"], ["5", "0.5"]]
    assert rows(job / "speed_of_light.csv") == [["step", "speed of light"], ["4", "3.5"]]
    [header, [step, value]] = rows(job / "ttft_s.csv")
    assert header == ["step", "ttft_s"] and step == "5" and float(value) == report.ttft_s
    assert load_report(tmp_path / "out" / "report.json") == report
    assert (tmp_path / "out" / "picture.png").stat().st_size > 10_000

    with caplog.at_level(logging.WARNING, logger="megakv"):
        track(report, lose_disk=True)
    [record] = caplog.records
    assert "megakv.tracking.csv" in record.getMessage(), "warned once, and the run went on"


def test_a_second_run_of_a_job_appends_without_a_second_header(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "runs" / "job"
    job.mkdir(parents=True)
    (job / "loss_first.csv").write_text("step,first\n3,9.0\n")
    track(report)
    assert rows(job / "loss_first.csv") == [["step", "first"], ["3", "9.0"], ["4", "1.0"], ["5", "0.5"]]


@pytest.mark.parametrize("rank", [0, 1])
def test_wandb_enabled_but_not_installed_is_refused_on_every_rank(monkeypatch, rank):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="megakv.tracking.wandb.enabled"):
        Tracker(TrackingConfig(wandb={"enabled": True}), {}, rank)


def test_only_rank_0_writes(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrackingConfig(csv={"enabled": True}, wandb={"enabled": True}, json="a/b.json", timeline="c.png")
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb())
    tracker = Tracker(config, {}, 1)
    tracker.log({"x": 1.0}, 0)
    tracker.log_report(report)
    tracker.close()
    assert tracker.wandb_directory is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ({"json": "file/r.json"}, "megakv.tracking.json"),
        ({"timeline": "file/t.png"}, "megakv.tracking.timeline"),
        ({"json": "."}, r"megakv.tracking.json \.: cannot be written: Is a directory"),
        ({"csv": {"enabled": True, "output_path": "file"}}, "megakv.tracking.csv.output_path"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_run(tmp_path, monkeypatch, section, setting):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=setting):
        Tracker(TrackingConfig(**section), {}, 0)


def test_a_report_that_cannot_be_written_says_so_and_leaves_nothing(report, tmp_path):
    tracker = Tracker(TrackingConfig(json=str(tmp_path / "r.json")), {}, 0)
    (tmp_path / "r.json").mkdir()
    with pytest.raises(MegaKVError, match="megakv.tracking.json"):
        tracker.log_report(report)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def fake_wandb(*, mode="online", logged_in=False, active=None, failing=()):
    """A wandb module that records how it is called, and fails where it is told to."""
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.calls = []

    def call(name):
        def record(*args, **kwargs):
            wandb.calls.append((name, args, kwargs))
            if name in failing:
                raise RuntimeError(f"no {name} today")
            words = {"dir": "/somewhere/files", "disabled": mode == "disabled"}
            return types.SimpleNamespace(log=call("log"), finish=call("finish"), **words)

        return record

    def login(*, prompt, verify):
        assert prompt is False and verify is False
        return logged_in

    wandb.run, wandb.login, wandb.init = active, login, call("init")
    wandb.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode))
    wandb.Settings = lambda **values: types.SimpleNamespace(**values)
    return wandb


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({}, "offline"),
        ({"logged_in": True}, "online"),
        ({"mode": "offline", "logged_in": True}, "offline"),
        ({"mode": "disabled"}, "disabled"),
        ({"active": types.SimpleNamespace(offline=False)}, "online"),
        ({"active": types.SimpleNamespace(offline=True), "logged_in": True}, "offline"),
    ],
)
def test_online_only_for_a_user_who_is_logged_in_and_wants_it(monkeypatch, situation, expected):
    wandb = fake_wandb(**situation)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = WandbRun(WandbTrackingConfig(enabled=True, project="p", team="t", name="n"), {"a": 1})
    [(_, _, options)] = wandb.calls
    assert options["mode"] == expected and options["settings"].silent == (expected != "online")
    assert (options["project"], options["entity"], options["name"], options["config"]) == ("p", "t", "n", {"a": 1})
    assert run.directory == (None if expected == "disabled" else Path("/somewhere"))


def test_events_of_one_step_are_one_call(monkeypatch):
    wandb = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracker = Tracker(TrackingConfig(wandb={"enabled": True}), {}, 0)
    tracker.log({"a": 1.0, "b": 2.0}, 3)
    tracker.log({"a": 5.0}, 4)
    logged = [(args[0], options["step"]) for name, args, options in wandb.calls if name == "log"]
    assert logged == [({"a": 1.0, "b": 2.0}, 3), ({"a": 5.0}, 4)]


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_a_failing_service_warns_once_and_the_run_goes_on(monkeypatch, caplog, failing):
    wandb = fake_wandb(failing=(failing,))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with caplog.at_level(logging.WARNING, logger="megakv"):
        run = WandbRun(WandbTrackingConfig(enabled=True), {})
        for step in range(3):
            run.log({"a": 1.0}, step)
        run.close()
    [message] = [record.getMessage() for record in caplog.records]
    assert f"no {failing} today" in message
    assert sum(name == "log" for name, _, _ in wandb.calls) == {"init": 0, "log": 1, "finish": 3}[failing]
