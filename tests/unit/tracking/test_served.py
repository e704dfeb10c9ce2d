"""What a server did, in reports, on their pages, and in the monitors while it serves."""

import csv
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megakv.serving.stats import ServingStats, TrafficLog
from megakv.tracking.config import TrackingConfig
from megakv.tracking.page import page
from megakv.tracking.report import report_from_json, report_to_json
from megakv.tracking.served import MOST_MOMENTS, Moment, ServedTraffic, thinned
from megakv.tracking.tables import report_tables
from megakv.tracking.tracker import Tracker
from tests.unit.tracking.reports import random_report


def stats(number: int) -> ServingStats:
    return ServingStats(
        state="serving", waiting=number, running=3, requests=10, cancelled=1, failed=0, preempted=2, compressed=5,
        passes=99, prompt_tokens=1000, hit_tokens=250, computed_tokens=750, new_tokens=500,
        proposed_tokens=80, accepted_tokens=60, waiting_max=9, running_max=7,
        kv_tokens={"device": 4096, "host": 0, "disk": 77}, kv_capacity={"device": 8192, "host": 0, "disk": 100},
        kv_bytes={"device": 1 << 20, "host": 0, "disk": 5}, memory_bytes=(1, 2),
        ttft_s=[random.uniform(0.1, 5) for _ in range(50)], token_s=[0.01, 0.02],
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> TrafficLog:
    seen = iter(range(10**6))
    tracker = Tracker(TrackingConfig(csv={"enabled": True, "output_path": str(tmp_path)}), {}, 0)
    return TrafficLog(lambda: stats(next(seen)), tracker, interval_s=0.001)


def test_a_server_is_watched(log: TrafficLog, tmp_path: Path) -> None:
    with log:
        while log.traffic().moments[20:] == []:
            time.sleep(0.001)
    traffic = log.traffic()
    assert all(earlier.at_s < later.at_s for earlier, later in zip(traffic.moments, traffic.moments[1:], strict=False))
    with open(tmp_path / "megakv" / "served_waiting.csv") as file:
        rows = list(csv.reader(file))[1:]
    assert [int(float(value)) for _, value in rows[:20]] == [moment.waiting for moment in traffic.moments[:20]]
    scalars = traffic.scalars()
    assert scalars["served/hit_rate"] == 0.25 and scalars["served/kv_tokens_disk"] == 77
    assert scalars["served/ttft_s/p90"] == pytest.approx(np.percentile(traffic.ttft_s, 90))


def test_reports_and_pages_have_it(log: TrafficLog, random_source: random.Random) -> None:
    with log:
        pass
    report = replace(random_report(random_source), served=log.traffic(), ttft_s=None, ttit_s=None, step_s=[])
    again = report_from_json(report_to_json(report))
    assert again.served == report.served and again.scalars()["served/hit_rate"] == 0.25
    tables = report_tables(report)
    assert [row[0] for row in tables["served"].rows] == ["device", "disk", "host"]
    shown = page([("serve", report)])
    for text in (
        "25.0% hit rate",
        "10 in",
        "2 preempted",
        "5 with compressed caches",
        "60 of 80 proposed tokens accepted",
        "p99",
        "tier",
        "9 waiting, 7 running",
    ):
        assert text in shown, text
    assert page([("a", report), ("b", random_report(random_source))])


def test_moments_stay_few() -> None:
    moment = Moment(at_s=0.0, waiting=1, running=1, prompt_tokens=1, hit_tokens=0, new_tokens=0, kv_tokens={})
    moments: list[Moment] = []
    for number in range(5000):
        moments.append(replace(moment, at_s=float(number)))
        if len(moments) >= MOST_MOMENTS:
            moments = thinned(moments)
    assert moments[0].at_s == 0 and moments[-1].at_s == 4999 and len(moments) < MOST_MOMENTS
    ServedTraffic(
        seconds=1.0, requests=0, cancelled=0, failed=0, preempted=0, passes=0, prompt_tokens=0, hit_tokens=0,
        computed_tokens=0, new_tokens=0, ttft_s=[], token_s=[], kv_tokens={}, kv_capacity={}, kv_bytes={},
        moments=moments,
    ).scalars()  # fmt: skip
