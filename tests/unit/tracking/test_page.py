"""The page about runs: whole, self-contained, and safe from what files say."""

import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megakv.launcher.command import main
from megakv.tracking.measurements import OffloadStep, PrefillPlan, head_balance
from megakv.tracking.page import MOST_RUNS, page, read_runs
from megakv.tracking.report import RunReport, report_to_json
from megakv.tracking.tables import by_layer, comparison, operations, report_tables
from tests.unit.tracking.reports import random_report

EVIL = "<script>alert('x')</script>\"&"


class Reader(HTMLParser):
    """Collects tags, addresses and text; complains about tags that do not match."""

    VOID = ("meta", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


@pytest.fixture
def report() -> RunReport:
    found = random_report(random.Random(7))
    step = OffloadStep(
        plan="stream", cached=100, recomputed=40, on_host=10, resident=0, predicted_s=0.5, measured_s=0.4, waited_s=0.1,
        bytes_in=1000, bytes_out=10, link_utilisation=0.5, disk_bytes=400, disk_utilisation=0.25,
        weight_bytes=30, kv_bits=4, profiled=True,
    )  # fmt: skip
    other = replace(step, plan="all", recomputed=44, measured_s=0.6, link_utilisation=1.0, profiled=False)
    found.ranks[1].offload = [step, other]
    found.ranks[1].disk_io = "files"
    found.balance = head_balance([[4, 4], [2, 6], [3, 3], [5, 5]], [[1.0, 1.0]] * 4, 2, mapping=("map.json", "d", 0.9))
    return found


def test_page_has_every_part_and_needs_nothing_else(report: RunReport) -> None:
    html = page([("first", report), ("second", random_report(random.Random(8), cp=4, tp=1))])
    reader = read(html)
    assert all(address.startswith("data:image/png;base64,") for address in reader.addresses)
    # A timeline of each, both on one axis, and a picture of what was offloaded.
    assert len(reader.addresses) == 4
    assert not re.search(r"https?://|url\(|@import", html)
    for part in ("Balance of tokens", "Communication", "Prefill: predicted", "Offloaded keys", "KV heads (FairKV)"):
        assert part in reader.text
    assert "second / first" in reader.text and "CP 4 x TP 1" in reader.text and "map.json" in reader.text


def test_text_of_reports_is_escaped(report: RunReport) -> None:
    report.model, report.config = EVIL, {EVIL: EVIL}
    report.machine, report.versions = {"cpu": EVIL}, {EVIL: EVIL}
    report.prefill = PrefillPlan(EVIL, None, {EVIL: 1.0})
    report.ranks[1].offload = [replace(step, plan=EVIL + "$x_{$") for step in report.ranks[1].offload]
    for rank in report.ranks:
        rank.host = EVIL
        rank.traffic = [replace(traffic, operation=EVIL) for traffic in rank.traffic]
    html = page([(EVIL, report)])
    assert "<script" not in html
    assert "script" not in read(html).tags


def test_numbers_of_the_tables(report: RunReport) -> None:
    tables = report_tables(report)
    offload = dict(zip(tables["offload"].columns, tables["offload"].rows[0], strict=True))
    assert (offload["rank"], offload["passes"], offload["recomputed"], offload["bytes_in"]) == (1, 2, 44, 2000)
    assert (offload["predicted_s"], offload["measured_s"]) == pytest.approx((1.0, 1.0))
    # Of the pass that measured no speeds.
    assert offload["error"] == pytest.approx(0.5 / 0.6 - 1)
    assert (offload["plans"], offload["disk_io"]) == ("stream 1, all 1", "files")
    assert (offload["link_utilisation"], offload["disk_utilisation"]) == pytest.approx((0.8, 0.25))
    assert (offload["disk_bytes"], offload["weight_bytes"], offload["kv_bits"]) == (800, 60, "4 (lossy)")
    passes = [dict(zip(tables["offload_steps"].columns, row, strict=True)) for row in tables["offload_steps"].rows]
    assert [(each["rank"], each["pass"], each["plan"], each["recomputed"]) for each in passes] == [
        (1, 1, "stream", 40),
        (1, 2, "all", 44),
    ]
    assert [each["profiled"] for each in passes] == ["yes", "no"]
    scalars = report.scalars()
    assert (scalars["offload/bytes_in"], scalars["offload/link_utilisation"]) == (2000.0, 0.75)
    assert (scalars["offload/disk_bytes"], scalars["offload/disk_utilisation"]) == (800.0, 0.25)
    assert scalars["offload/recomputed_share"] == pytest.approx(0.42)
    assert (scalars["offload/passes/stream"], scalars["offload/passes/all"]) == (0.25, 0.25)
    assert scalars["offload/prediction_error"] == pytest.approx(0.6 / 0.5 - 1)
    chosen = dict(zip(tables["prefill"].columns, tables["prefill"].rows[0], strict=True))
    assert chosen["method"] == "runahead" and chosen["error"] == pytest.approx(0.5 / (report.ttft_s or 0) - 1)
    total = sum(row[2] for row in operations(report).rows)  # type: ignore[misc]
    assert total == sum(row[4] for row in by_layer(report).rows)  # type: ignore[misc]
    assert [row[1] for row in tables["balance"].rows] == [8, 8, 6, 10]
    other = random_report(random.Random(9))
    ratios = {str(row[0]): row[1:] for row in comparison([report, other], ["a", "b"]).rows}
    assert ratios["ttft_s"] == [report.ttft_s, other.ttft_s, pytest.approx((other.ttft_s or 0) / (report.ttft_s or 1))]
    assert ratios["fairkv/utilisation"][1:] == [None, None]


def test_a_run_without_tokens_has_a_page() -> None:
    bare = random_report(random.Random(1), new_tokens=0)
    bare.ttft_s = bare.ttit_s = bare.prefill = None
    for rank in bare.ranks:
        rank.events, rank.traffic = [], []
    assert "Prefill: predicted" not in read(page([("bare", bare)])).text


def test_the_command(tmp_path: Path, report: RunReport, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "run.json"
        path.write_text(report_to_json(report))
        paths.append(str(path))
    out = tmp_path / "page.html"
    assert main(["report", *paths, "--html", str(out)]) == 0
    assert "run (2)" in read(out.read_text()).text
    assert [name for name, _ in read_runs(paths)] == ["run", "run (2)"]
    capsys.readouterr()
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for arguments, message in (
        ([str(broken)], "this is not a MegaKV run report"),
        ([str(tmp_path / "none.json")], "none.json cannot be read: No such file or directory; megakv.tracking.json"),
        ([str(tmp_path)], "cannot be read: Is a directory"),
        (paths * MOST_RUNS, f"allowed: 1 to {MOST_RUNS} on one page"),
    ):
        assert main(["report", *arguments, "--html", str(tmp_path / "other.html")]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "other.html").exists()
