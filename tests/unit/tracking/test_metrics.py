import json
import math
from pathlib import Path

import pytest
import torch

from megakv.tracking.machine import machine_info, version_info
from megakv.tracking.measurements import CandidateCounts, Event, Traffic
from megakv.tracking.overview import overview
from megakv.tracking.report import RankReport, load_report, report_from_json, report_to_json
from tests.unit.tracking.reports import random_report


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (3, 1), (2, 4)])
def test_round_trip(random_source, cp, tp):
    report = random_report(random_source, cp=cp, tp=tp)
    assert report_from_json(report_to_json(report)) == report


def test_no_decoded_token_and_values_json_lacks(report):
    report.ttit_s = None
    report.config = {"dtype": torch.bfloat16, "path": Path("a/b"), "limit": math.inf}
    text = report_to_json(report)
    assert report_from_json(text).config == {"dtype": "torch.bfloat16", "path": "a/b", "limit": "Infinity"}
    assert report_from_json(text).ttit_s is None and "ttit_s" not in report_from_json(text).scalars()


def test_scalars_add_up_over_ranks(report):
    scalars = report.scalars()
    assert scalars["bytes_sent/ring"] == sum(rank.bytes_sent["ring"] for rank in report.ranks)
    assert scalars["calls/broadcast"] == 4
    assert scalars["seconds_exposed_max/ring"] == max(
        rank.by_operation("seconds_exposed")["ring"] for rank in report.ranks
    )
    assert scalars["seconds_exposed_max/broadcast"] == 0
    assert scalars["ttft_predicted_s/runahead"] == 0.5
    assert scalars["ttit_s/p50"] == scalars["ttit_s/p99"] == pytest.approx(report.ttit_s)
    assert scalars["prompt_tokens_per_s"] == pytest.approx(report.prompt_tokens / report.ttft_s)


def test_candidates_are_counted_by_step(report):
    assert "tokens_per_step" not in report.scalars() and "candidates" not in overview(report)
    report.new_tokens, report.candidates = 30, CandidateCounts(steps=12, proposed=40, accepted=18)
    scalars = report_from_json(report_to_json(report)).scalars()
    assert scalars["tokens_per_step"] == 2.5 and scalars["accepted_share"] == 0.45
    assert overview(report)["candidates"] == "2.50 tokens per step; 18 of 40 proposed tokens accepted"
    report.candidates = CandidateCounts(steps=30, proposed=0, accepted=0)
    assert report.scalars()["tokens_per_step"] == 1 and "accepted_share" not in report.scalars()


def _without_versions(data):
    del data["versions"]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without_versions, "versions: Field required"),
        (lambda data: data.update(ttft=1.0), "ttft: Unexpected keyword argument"),
        (lambda data: data.update(prompt_tokens="12"), "prompt_tokens: Input should be a valid integer"),
        (lambda data: data.update(ttft_s=-1.0), "ttft_s = -1.0"),
        (lambda data: data.update(mesh={"cp": 2}), "it must give cp and tp"),
        (lambda data: data["prefill"].update(chosen=None), "prefill.chosen: Input should be a valid string"),
        (lambda data: data["ranks"].pop(), "ranks 0 to 3 in order, found [0, 1, 2]"),
        (lambda data: data["ranks"].reverse(), "found [3, 2, 1, 0]"),
        (lambda data: data["ranks"][1].update(kv_bytes=-5), "rank 1 reports kv_bytes = -5"),
        (
            lambda data: data["ranks"][1]["traffic"][0].update(bytes_sent=-1),
            "ranks.1.traffic.0.bytes_sent: Input",
        ),
        (lambda data: data["ranks"][1]["traffic"][0].update(seconds=-1.0), "'ring' in layer 0 has counts or times"),
        (lambda data: data.update(mesh={"cp": 10**15, "tp": 10**15}), "found [0, 1, 2, 3]"),
        (lambda data: data.update(prompt_tokens=10**400), "it cannot be negative or not finite"),
        (lambda data: data["ranks"][0].update(head_tokens=[[-1]]), "ranks.0.head_tokens.0.0: Input should be greater"),
        (lambda data: data.update(generated_s=math.nan), "generated_s: Input should be a finite number"),
        (lambda data: data.update(format="megakv plan"), "format: Input should be 'megakv run'"),
        (lambda data: data.update(version=2), "version: Input should be 1"),
        (lambda data: data.update(answers=[{"question": "why?"}]), "answers.0.answer: Field required"),
        (lambda data: data.update(answers=[{"question": None, "answer": "x", "tokens": [-1]}]), "answers.0.tokens.0: "),
        (lambda data: data["ranks"][2]["events"][0].update(kind="idle"), "ranks.2.events.0.kind"),
        (lambda data: data["ranks"][2]["events"][0].update(end=-1.0), "it must end after it starts"),
    ],
)
def test_broken_reports_are_refused_by_key(report, tmp_path, damage, named):
    data = json.loads(report_to_json(report))
    damage(data)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as refusal:
        load_report(path)
    assert named in str(refusal.value) and str(path) in str(refusal.value)


def test_truncated_reports_are_refused(report, random_source):
    text = report_to_json(report)
    for _ in range(20):
        with pytest.raises(ValueError, match="not a MegaKV run report"):
            report_from_json(text[: random_source.randrange(len(text))])


def test_impossible_measurements_are_refused_where_they_are_made():
    with pytest.raises(ValueError, match="must end after it starts"):
        Event("x", "compute", 2.0, 1.0)
    with pytest.raises(ValueError, match="must end after it starts"):
        Event("x", "compute", 0.0, math.nan)
    with pytest.raises(ValueError, match="compute, communication or wait"):
        Event("x", "idle", 0.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'ring' in layer None has counts or times"):
        Traffic("ring", None, 1, 1, 1.0, math.nan)
    with pytest.raises(ValueError, match="rank 0 reports kv_bytes = -1"):
        RankReport(0, "host", 0, 0, 1, -1, 1)


def test_machine_and_versions_are_known():
    machine, versions = machine_info(), version_info()
    assert json.loads(json.dumps(machine)) == machine
    assert machine["cores"] >= 1 and machine["memory_bytes"] > 2**28 and machine["cpu"] and machine["host"]
    assert versions["torch"] == torch.__version__ and {"python", "transformers", "deepspeed"} <= set(versions)
