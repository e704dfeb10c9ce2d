"""The page about runs: whole, self-contained, and safe from what files say."""

import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megakv.launcher.command import main
from megakv.tracking import units
from megakv.tracking.measurements import Event, OffloadStep, PrefillPlan, Traffic, head_balance
from megakv.tracking.overview import methods
from megakv.tracking.page import MOST_RUNS, page, read_runs
from megakv.tracking.report import Answer, RunReport, report_to_json
from megakv.tracking.tables import comparison, operations, rank_seconds, report_tables
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


def eventless(report: RunReport) -> RunReport:
    """As of a run that recorded no timeline."""
    for rank in report.ranks:
        rank.events = []
    return report


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
    report.dtype, report.methods, report.settings = EVIL, {"prefill": {EVIL: 1}}, {EVIL: EVIL}
    report.answers = [Answer(question=EVIL, answer=EVIL, expected=EVIL, correct=True)]
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
    assert (offload["rank"], offload["passes"], offload["recomputed_share"], offload["bytes_in"]) == (1, 2, 0.42, 2000)
    assert (offload["predicted_s"], offload["measured_s"]) == pytest.approx((1.0, 1.0))
    # Of the pass that measured no speeds.
    assert offload["prediction_error"] == pytest.approx(0.5 / 0.6 - 1)
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
    assert (scalars["offload/bytes_in"], scalars["offload/link_utilisation"]) == (2000.0, pytest.approx(0.8))
    assert (scalars["offload/disk_bytes"], scalars["offload/disk_utilisation"]) == (800.0, 0.25)
    assert scalars["offload/recomputed_share"] == pytest.approx(0.42)
    assert (scalars["offload/passes/stream"], scalars["offload/passes/all"]) == (0.25, 0.25)
    assert scalars["offload/prediction_error"] == pytest.approx(0.5 / 0.6 - 1)
    chosen = dict(zip(tables["prefill"].columns, tables["prefill"].rows[0], strict=True))
    assert chosen["method"] == "runahead" and chosen["error"] == pytest.approx(0.5 / (report.ttft_s or 0) - 1)
    total = sum(row[2] for row in operations(report).rows)  # type: ignore[misc]
    assert total == sum(traffic.bytes_sent for rank in report.ranks for traffic in rank.traffic)
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


def test_a_page_says_what_ran_and_explains_its_words(report: RunReport) -> None:
    report.dtype, report.generated_s = "bfloat16", 9.0
    report.methods = {"prefill": {"pass_kv": 3, "pass_q": 1}, "decode": {"replicated": 28}}
    report.answers = [Answer(question="How many?", answer=" Five.", expected="Six", correct=False)]
    report.tokens_equal = False
    report.config["megakv"] = {"context_parallel": {"prefill": "auto"}, "offload": {"method": "auto"}}
    report.config["note"] = "TSP"
    shown = read(page([("run", eventless(report))])).text
    for words in (
        "some/tiny-llama", "CP 2 x TP 2, 4 ranks on 1 host", "bfloat16", "NO", "Five.", "replicated queries",
        "auto took pass-KV in 75% of layers, pass-Q in 25% of layers (predicted: one rank 750 ms, KV-Runahead 500 ms)",
        "off the accelerator: auto took stream 1, all 1 passes, in 4 bits (lossy)", "expected: Six (WRONG)",
        "time to first token", "ring attention in which queries travel", "communication in which a rank does nothing",
    ):  # fmt: skip
        assert words in shown, words
    # A config's words are not the page's.
    assert "tensor and sequence parallelism" not in shown


def test_what_ran_is_known_of_other_kinds_of_runs() -> None:
    plain = random_report(random.Random(2), cp=1, tp=2)
    plain.methods = {"prefill": {"pass_kv": 3}}
    section = {"fairkv": {"method": "snapkv", "budget": 0.25}, "weights": {"format": "fp8"}}
    plain.config, plain.weights = {"megakv": section, "dtype": "x"}, "fp8"
    assert methods(plain) == {
        "prefill": "tensor parallelism alone",
        "keys and values": "compressed by snapkv, budget 0.25 (lossy)",
        "weights": "fp8 (lossy)",
    }
    plain.config["megakv"]["fairkv"]["budget"] = 256.0
    assert methods(plain)["keys and values"] == "compressed by snapkv, budget 256 (lossy)"
    plain.config, plain.weights = {"megakv": [1], "simulated": {"method": "offload"}}, None
    assert methods(plain) == {"prefill": "tensor parallelism alone", "keys and values": "off the accelerator"}


def test_no_time_is_lost_or_counted_twice(report: RunReport) -> None:
    for rank in report.ranks:
        rank.events = [Event("a", "compute", 0.0, 2.0), Event("b", "compute", 1.0, 3.0), Event("c", "wait", 4.0, 5.0)]
        rank.traffic = [Traffic("ring", 0, 1, 10, 1.5, 1.0), Traffic("logits", None, 1, 10, 0.25, 0.25)]
    report.ranks[1].events = []
    report.generated_s = 6.0
    first, second, *_ = rank_seconds(report).rows
    assert first == [0, 3.0, 1.25, 1.75, 0.5]
    # Without events what was computed is not known; rank 1 waited 0.2 s for what lies off the accelerator.
    assert second == [1, None, pytest.approx(1.45), pytest.approx(4.55), 0.5]
    report.generated_s = None
    assert rank_seconds(report).rows[0] == [0, 3.0, 1.25, None, 0.5]


def test_runs_without_events_have_no_timeline(report: RunReport) -> None:
    bare = eventless(random_report(random.Random(3)))
    assert not read(page([("bare", bare)])).addresses
    # One of the other run, which nothing stands beside, and the picture of what it offloaded.
    assert len(read(page([("full", report), ("bare", bare)])).addresses) == 2


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kv_bytes", 0, "0 B"), ("kv_bytes", 1023, "1,023 B"), ("bytes_sent/ring", 3 << 19, "1.5 MiB"),
        ("peak_bytes_max", 5 << 40, "5 TiB"), ("ttft_s", 1.5, "1.5 s"), ("seconds_exposed", 0.0123, "12.3 ms"),
        ("ttft_predicted_s/pass_kv", 4e-6, "4 us"), ("ttit_s", 0.0, "0 s"), ("seconds", 86400.0, "86,400 s"),
        ("prompt_tokens_per_s", 12345.6, "12,346 tokens/s"), ("error", -0.051, "-5.1%"),
        ("fairkv/busy_rate/rank0", 0.5, "50.0%"), ("tokens", 12345, "12,345"), ("ttft_s", None, "-"),
    ],
)  # fmt: skip
def test_numbers_have_units(name: str, value: float | None, words: str) -> None:
    assert units.shown(name, value) == words


def test_names_have_words() -> None:
    names = [
        "kv_bytes",
        "seconds_exposed_max/pass_kv",
        "offload/passes/cpu_rank",
        "offload/on_host_share",
        "predicted_s",
    ]
    assert [units.title(name) for name in names] == [
        "KV cache", "exposed, worst rank's: pass_kv", "offload: passes: cpu_rank",
        "offload: attended on the host, share", "predicted",
    ]  # fmt: skip


FRAMES = """<body><script>
const found = [];
for (const [width, source] of %s) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:800px`;
  frame.srcdoc = source;
  frame.onload = () => {
    const page = frame.contentDocument;
    const boxes = [...page.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth);
    const { scrollWidth, clientWidth } = page.documentElement;
    const broken = [...page.querySelectorAll(".facts td:first-child")].flatMap(label => {
      const words = [...label.textContent.matchAll(/\\S+/g)];
      return words.filter(word => {
        const range = page.createRange();
        range.setStart(label.firstChild, word.index);
        range.setEnd(label.firstChild, word.index + word[0].length);
        return range.getClientRects().length > 1;
      }).map(word => word[0]);
    });
    found.push({width, hidden: scrollWidth - clientWidth, boxes: boxes.length, broken,
                bar: page.querySelector(".chart i").getBoundingClientRect().width});
    document.title = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script></body>"""


def test_a_phone_shows_it_without_scrolling_sideways(report: RunReport, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome on the PATH")
    report.model, report.generated_s = "/a/long/path/" + "x" * 300, 9.0
    report.ranks[0].host = "h" * 200
    runs = [("first", report), ("second", eventless(random_report(random.Random(8), cp=4, tp=1)))]
    both, one = page(runs), page(runs[:1])
    frames = json.dumps([[390, both], [391, one], [1280, both]]).replace("</", "<\\/")
    (tmp_path / "frames.html").write_text(FRAMES % frames)
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=10000", "--dump-dom", (tmp_path / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    small, single, large = sorted(json.loads(unescape(title[1])), key=lambda frame: frame["width"])
    assert small["hidden"] == single["hidden"] == large["hidden"] == 0
    # Names of facts are broken between words alone.
    assert small["broken"] == single["broken"] == large["broken"] == []
    # Wide tables and pictures scroll inside their boxes; a bar is as wide as its share of the axis.
    assert small["boxes"] > large["boxes"] > 0 and 0 < small["bar"] < large["bar"]


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
        (
            [str(tmp_path / "none.json")],
            "none.json cannot be read: No such file or directory; the main job's",
        ),
        ([str(tmp_path)], "cannot be read: Is a directory"),
        (paths * MOST_RUNS, f"allowed: 1 to {MOST_RUNS} on one page"),
    ):
        assert main(["report", *arguments, "--html", str(tmp_path / "other.html")]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "other.html").exists()
