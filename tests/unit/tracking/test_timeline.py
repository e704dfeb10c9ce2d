import json
import math

import matplotlib.image
import numpy as np
import pytest

from megakv.tracking.measurements import Event
from megakv.tracking.page import page
from megakv.tracking.timeline import busy_share, default_end, draw_timelines, drawn_part, write_trace
from megakv.tracking.units import duration
from tests.unit.tracking.reports import random_report

BLUE, ORANGE, RED = (0x2F, 0x6D, 0xB3), (0xF2, 0xB8, 0x72), (0xB3, 0x26, 0x1E)


def pixels(path):
    picture = matplotlib.image.imread(path)
    return (picture[:, :, :3] * 255).round().astype(int)


def count(picture, colour):
    return int((np.abs(picture - np.array(colour)).max(axis=2) <= 3).sum())


@pytest.mark.parametrize(("cp", "tp", "layers"), [(1, 1, 2), (3, 1, 5), (8, 2, 64)])
def test_every_rank_has_its_lanes(random_source, tmp_path, cp, tp, layers):
    report = random_report(random_source, cp=cp, tp=tp, layers=layers)
    path = tmp_path / "new" / "timeline.png"
    draw_timelines([report], path)
    picture = pixels(path)
    height, width, _ = picture.shape
    assert 1500 <= width <= 2500 and 200 <= height <= 1800
    assert count(picture, BLUE) > 2000 * cp * tp
    assert count(picture, ORANGE) > 500 * cp * tp
    assert count(picture, RED) > 300 * cp * tp
    assert [path.name for path in path.parent.iterdir()] == ["timeline.png"]


def test_length_in_the_picture_is_time_in_the_run(report, tmp_path):
    for rank in report.ranks:
        rank.events = [Event("a", "compute", 0.0, 0.5), Event("r", "communication", 0.5, 0.75)]
    draw_timelines([report], tmp_path / "t.png", window=(0.0, 1.0))
    row = pixels(tmp_path / "t.png")
    blue = (np.abs(row - np.array(BLUE)).max(axis=2) <= 3).sum(axis=1).max()
    orange = (np.abs(row - np.array(ORANGE)).max(axis=2) <= 3).sum(axis=1).max()
    assert blue / orange == pytest.approx(2.0, rel=0.05)


def test_window_chooses_what_is_seen(report, tmp_path):
    for rank in report.ranks:
        rank.events = [Event("a", "compute", 0.0, 1.0), Event("b", "wait", 1.0, 2.0)]
    draw_timelines([report], tmp_path / "first.png", window=(0.0, 1.0))
    draw_timelines([report], tmp_path / "second.png", window=(1.0, 2.0))
    first, second = pixels(tmp_path / "first.png"), pixels(tmp_path / "second.png")
    assert count(first, BLUE) > 20 * count(second, BLUE) and count(second, RED) > 20 * count(first, RED)
    with pytest.raises(ValueError, match=r"window is \(2.0, 2.0\)"):
        draw_timelines([report], tmp_path / "none.png", window=(2.0, 2.0))
    assert not (tmp_path / "none.png").exists()


def test_the_default_end_holds_prefill_and_first_tokens(random_source):
    report = random_report(random_source, new_tokens=200)
    last = max(event.end for event in report.ranks[0].events)
    end = default_end(report)
    assert report.ttft_s + 8 * report.ttit_s <= end < last
    shown = math.floor((end - report.ttft_s) / report.ttit_s * (1 + 1e-9))
    words = f"the prompt and the first {shown} of 199 decoded tokens"
    assert shown >= 8 and drawn_part(report, end) == words and drawn_part(report, last) == ""
    assert f"Drawn: {words}." in page([("run", report)])
    assert f"<p>Drawn: run: {words}.</p>" in page([("run", report), ("again", report)])
    # A simulated run has no time of each token.
    report.step_s = []
    assert drawn_part(report, end) == f"the first {duration(end)} of {duration(last)}"


def test_a_run_without_events_or_tokens_still_draws(report, tmp_path):
    for rank in report.ranks:
        rank.events = []
    report.ttft_s = report.ttit_s = None
    draw_timelines([report], tmp_path / "empty.png")
    assert pixels(tmp_path / "empty.png").std() > 1


def test_busy_share_against_sampling(random_source):
    events = []
    for _ in range(300):
        start = random_source.uniform(-1.0, 4.0)
        events.append(Event("x", "compute", start, start + random_source.expovariate(20.0)))
    begin, end, columns, samples = 0.3, 3.1, 17, 2000
    times = begin + (np.arange(columns * samples) + 0.5) * (end - begin) / (columns * samples)
    running = np.zeros(len(times), dtype=bool)
    for event in events:
        running |= (times >= event.start) & (times < event.end)
    expected = running.reshape(columns, samples).mean(axis=1)
    np.testing.assert_allclose(busy_share(events, begin, end, columns), expected, atol=0.03)
    assert busy_share([], begin, end, columns).sum() == 0


def test_trace_holds_every_event_in_microseconds(report, tmp_path):
    write_trace(report, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names[3] == "rank 3 (cp 1, tp 1) on localhost"
    for rank in report.ranks:
        own = [event for event in events if event["pid"] == rank.rank]
        for kind in ("compute", "wait"):
            seconds = sum(event.end - event.start for event in rank.events if event.kind == kind)
            assert sum(event["dur"] for event in own if event.get("cat") == kind) == pytest.approx(seconds * 1e6)
        begun = {event["id"]: event["ts"] for event in own if event["ph"] == "b"}
        ended = {event["id"]: event["ts"] for event in own if event["ph"] == "e"}
        assert begun.keys() == ended.keys() and len(begun) == sum(e.kind == "communication" for e in rank.events)
        assert all(ended[key] >= begun[key] for key in begun)


def test_runs_beside_each_other_share_an_axis_of_time(random_source, tmp_path):
    reports = [random_report(random_source, cp=cp, tp=1) for cp in (1, 3)]
    draw_timelines(reports, tmp_path / "both.png")
    parts = []
    for report in reports:
        draw_timelines([report], tmp_path / "one.png")
        parts.append(pixels(tmp_path / "one.png"))
    both = pixels(tmp_path / "both.png")
    assert abs(both.shape[0] - sum(part.shape[0] for part in parts)) <= 2 and both.shape[1] == parts[0].shape[1]
    longest = max(reports, key=default_end)
    end = default_end(longest)
    draw_timelines([reports[0]], tmp_path / "one.png", window=(0.0, end))
    alone, top = pixels(tmp_path / "one.png"), both[: parts[0].shape[0]]
    assert count(top, BLUE) == pytest.approx(count(alone, BLUE), rel=0.02)
