"""benchmarks/offload.py: a tiny real run, and what its verdicts, tables and charts are made of."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.charts import draw_charts
from benchmarks.harness.offload.case import contenders
from benchmarks.harness.offload.decoder import Sample, config_of
from benchmarks.harness.offload.plan import GPU, LARGE, PARTS, cases, variant
from benchmarks.harness.offload.report import charts, settings, show_tables, summarise
from megakv.costmodel.shape import ModelShape
from tests.unit.benchmarks.running import fork_benchmark, refusal

fork = partial(fork_benchmark, "offload.py", env={"MEGAKV_TEST_EVEN_COSTS": "1"})
LINK = 0.01
TINY = [
    "--layers", "2", "--hidden", "32", "--heads", "4", "--batch", "2", "--group", "1", "--prompt", "33", "--new", "7",
    "--chunk", "8", "--links", str(LINK), "--repeats", "1", "--least-repeats", "1",
]  # fmt: skip
METHODS = ["in_memory", "transformers", "stream", "kvpr", "chunked", "cpu_rank", "auto", "stream_4bit"]
MEASURED = ("links", "throughput", "batches", "hiding", "beams")
TOKEN = {"opt": 2 * 32 * 4, "gqa": 2 * 8 * 4}
"""Bytes of a token's keys and values in a layer, by model."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that measured some parts."""
    path = tmp_path_factory.mktemp("offload") / "offload.json"
    done = fork("--only", ",".join(MEASURED), "--json", path, *TINY, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "EMULATED link" in done.stdout
    return path


@pytest.fixture
def rows(results: Path) -> list[dict[str, Any]]:
    """Rows that a test may change."""
    return json.loads(results.read_text())["rows"]


@pytest.mark.drawn("benchmarks")
def test_rows_of_a_real_run(results: Path, rows: list[dict[str, Any]]) -> None:
    summary = json.loads(results.read_text())["summary"]
    assert summary["tokens_equal"] and summary["token_agreement"] == 1 and summary["link"] == "emulated"
    assert 0 <= summary["lossy_token_agreement"] <= 1
    assert summary["auto_over_best"] > 0 and summary["prediction_median_error"] >= 0
    assert set(summary["not_measured"]) == set(PARTS) - set(MEASURED)
    links = {(row["shape"], row["link_gb_s"], row["method"]): row for row in rows if row["part"] == "links"}
    assert list(links) == [(shape, LINK, method) for shape in TOKEN for method in METHODS]
    for (shape, _, method), row in links.items():
        assert len(row["seconds"]) == 1 and row["cache_bytes"] == 2 * 2 * 40 * TOKEN[shape]
        assert row["device_bytes"] > 0 and (row["bytes_in"] > 0) == (method != "in_memory")
        assert 0 < row["compute_utilisation"] <= 1
        assert ("forecast_s" in row) == ("predicted_s" in row and not row["lossy"])
        if method in ("stream", "cpu_rank"):
            # New tokens only: two sequences, two layers.
            assert row["bytes_out"] == pytest.approx(2 * 2 * TOKEN[shape], rel=0.01)
        if method == "transformers":
            # Everything comes back in every step: in the three that count, 37 to 39 tokens.
            assert row["bytes_out"] == pytest.approx(2 * 2 * TOKEN[shape] * 38, rel=0.01)
        if method == "stream":
            assert all(split == 0 for _, split in row["split_points"])
    assert min(split for _, split in links["opt", LINK, "chunked"]["split_points"]) > 0
    # In memory, the cache is on the accelerator; otherwise two layers of it are.
    assert links["opt", LINK, "in_memory"]["bytes_out"] == 0


@pytest.mark.drawn("benchmarks")
def test_rows_of_columns(rows: list[dict[str, Any]]) -> None:
    found = {row["method"]: row for row in rows if row["part"] == "throughput"}
    weights = found["stream"]["weight_bytes"]
    assert weights == 2 * 4 * (4 * 32 * 32 + 2 * 32 * 128)
    # Two groups, each of which brings all weights for itself.
    assert found["row_stream"]["weight_bytes"] == 2 * weights and found["row_stream"]["groups"] == 1
    assert found["stream"]["groups"] == 2 and found["stream_4bit"]["lossy"]
    for part, beams in (("hiding", 1), ("beams", 2)):
        hiding = [row for row in rows if row["part"] == part]
        assert [row["method"] for row in hiding] == ["stream", "kvpr_coarse", "kvpr"]
        assert all(row["tokens_equal"] and row["beams"] == beams for row in hiding)


@pytest.mark.drawn(1, "further parts")
def test_a_cache_that_is_partly_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "disk.json"
    done = fork("--only", "disk", "--shapes", "gqa", "--json", path, *TINY, "--links", "0.03", timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "reads paced to an EMULATED 0.015 GB/s" in done.stdout
    found = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(found) == METHODS[:-1]
    for method, row in found.items():
        assert row["tokens_equal"] and ("disk_io" in row) == (method not in ("in_memory", "transformers"))
        if "disk_io" in row:
            assert row["disk_gb_s"] == 0.015 and row["disk_io"] == "files" and row["in_memory_share"] == 0.75
            assert 0 < row["disk_bytes"] < 1.01 * row["bytes_in"] and row["disk_utilisation"] > 0
    # The last quarter of the keys and values, in pages of 16 tokens.
    assert 0.1 < found["stream"]["disk_bytes"] / found["stream"]["cache_bytes"] < 0.6
    # The host attends to what lies in memory alone.
    assert 0 < found["cpu_rank"]["on_host"] <= 0.8 * 2 * 39
    assert (tmp_path / "disk.disk.gqa.png").is_file()


@pytest.mark.drawn(1, "further parts")
def test_layers_with_windows(tmp_path: Path) -> None:
    path = tmp_path / "windows.json"
    done = fork("--only", "windows", "--json", path, *TINY, "--prompt", "200", "--links", "0.03", timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(found) == METHODS[:-1] and all(row["tokens_equal"] for row in found.values())
    # Both layers have one: 127 of their tokens are seen beside the new one, by transformers as well.
    seen = 2 * 2 * 127 * 2 * 4 * 8 * 4
    for method in ("stream", "transformers"):
        assert found[method]["bytes_in"] == pytest.approx(seen, rel=0.01), method
    assert all(
        split == 0 or method in ("kvpr", "chunked", "auto")
        for method, row in found.items()
        for _, split in row.get("split_points", ())
    )
    assert (tmp_path / "windows.windows.windowed.png").is_file()


@pytest.mark.drawn("benchmarks")
def test_tables_and_charts(
    results: Path, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["links.opt", "links.gqa", *(f"{part}.opt" for part in MEASURED[1:])]
    assert {path.name for path in results.parent.glob("*.png")} == {f"offload.{name}.png" for name in names}
    # Two links, and two prompts, in one picture and one table.
    some = [row for row in rows if row["part"] == "links"]
    more = some + [{**row, "context": 77} for row in some] + [{**row, "link_gb_s": 0.1} for row in some]
    drawn = draw_charts(tmp_path / "x.json", charts("fp32", more))
    assert [path.name for path in drawn].count("x.links.opt.png") == 1 and all(path.is_file() for path in drawn)
    # Both models in one table each, Table 2 and its form with beams, Table 5, and Figure 6's second row.
    assert len(settings(rows)) == 6 and len(settings(more)) == 2
    show_tables(more)
    said = capsys.readouterr().out
    assert said.count("EMULATED") == 2 and said.count("row-by-row") == 0
    assert sum(line.startswith("opt") for line in said.splitlines()) == 3 * len(METHODS)


@pytest.mark.drawn("benchmarks")
def test_verdicts(rows: list[dict[str, Any]]) -> None:
    some = [row for row in rows if (row["part"], row["shape"], row["link_gb_s"]) == ("links", "opt", LINK)]
    times = {"stream": 1.0, "kvpr": 0.8, "chunked": 0.5, "cpu_rank": 0.51, "auto": 0.6, "transformers": 2.0}
    for row in some:
        row["seconds"] = [times.get(row["method"], 0.1) * drift for drift in (1.0, 1.5, 0.7)]
        if "predicted_s" in row:
            row["predicted_s"] = 1.05 * times.get(row["method"], 0.1)
    found = summarise(some, exact_type=True)
    assert found["auto_over_best"] == pytest.approx(1.2)
    assert found["same_twice_by_case"] == {}
    # The best of fewer choices is no better than the best of all: a case without some of them counts, too.
    fewer = [row for row in some if row["method"] != "chunked"]
    assert summarise(fewer, exact_type=True)["auto_over_best"] == pytest.approx(0.6 / 0.51)
    chunked = next(row for row in some if row["method"] == "chunked")
    chunked |= {"again_seconds": [1.2 * seconds for seconds in chunked["seconds"][1:]], "again_from": 1}
    (twice,) = summarise(some, exact_type=True)["same_twice_by_case"].values()
    assert twice["value"] == pytest.approx(1.2)
    (speedups,) = found["speedup_over_transformers"].values()
    assert speedups["chunked"] == pytest.approx(4)
    assert found["predictions"]["within_10_percent"] == found["predictions"]["cases"] == 6
    for row in some:
        if "forecast_s" in row:
            row["forecast_s"] = 0.93 * times[row["method"]]
    forecasts = summarise(some, exact_type=True)["predictions"]
    assert forecasts["forecasts"] == 5 and forecasts["forecast_median_error"] == pytest.approx(0.07)
    next(row for row in some if row["method"] == "kvpr")["predicted_s"] = 0.3
    assert summarise(some, exact_type=True)["predictions"]["within_10_percent"] == 5
    next(row for row in some if row["method"] == "stream_4bit")["tokens_equal"] = False
    assert summarise(some, exact_type=True)["tokens_equal"]
    next(row for row in some if row["method"] == "kvpr")["tokens_equal"] = False
    assert not summarise(some, exact_type=True)["tokens_equal"]
    assert summarise(some, exact_type=False)["tokens_equal"] is None


def test_names() -> None:
    assert variant("row_stream").rows and variant("row_stream").method == "stream"
    assert variant("kvpr_4bit").kv_bits == 4 and variant("kvpr_coarse").coarse
    assert variant("in_memory").method == "in_memory" and "lossy" in variant("stream_4bit").title


def test_large_models_fit_their_machine() -> None:
    asked = Namespace(
        methods=None, gpu=True, quick=False, only=list(GPU), links=[None], shapes=None, batch=None, prompt=None,
        new=None, group=None, layers=None, hidden=0, heads=0,
    )  # fmt: skip
    found = cases(asked)
    shapes = {name: ModelShape.from_config(config_of(name, asked), dtype=torch.float16) for name in LARGE}
    assert len({case.name for case in found}) == len(found)
    for case in found:
        assert case.host_bytes(shapes[case.model]) < 110 << 30
        assert case.groups * (GPU[case.part].group or case.batch) == case.batch
    # The published sizes, embeddings apart: 6.4, 12.6 and 29.6, 6.5 and 7.0 billion.
    sizes = {name: sum(layer.dense for layer in shape.layers) / 1e9 for name, shape in shapes.items()}
    expected = {"opt-6.7b": 6.44, "opt-13b": 12.58, "opt-30b": 29.6, "llama-2-7b": 6.48, "llama-3-8b": 6.98}
    assert sizes == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--links", "0"], "--links 0: allowed: numbers above 0"),
        (["--shapes", "bert"], "--shapes bert: allowed: each of opt, mha, gqa, windowed once"),
        (["--only", "long"], "--only long: allowed: each of links, latency"),
        (
            ["--only", "latency", "--methods", "stream,row_stream"],
            "--methods stream,row_stream: allowed: each of auto,",
        ),
        (["--new", "3"], "--new 3: allowed: 6 or more"),
        (["--heads", "6"], "--heads 6: allowed: multiples of 4"),
        (["--batch", "3"], "--batch 3: allowed for part throughput: multiples of --group 2"),
        (["--gpu", "--links", "1"], "with --gpu the GPU's own is measured"),
    ],
)
def test_impossible_arguments(arguments: list[str], message: str) -> None:
    assert message in refusal("offload.py", arguments)


def test_further_rounds_are_for_what_is_close() -> None:
    times = {"in_memory": 0.1, "stream": 3.0, "kvpr": 1.2, "chunked": 1.1, "cpu_rank": 1.0, "auto": 2.0}
    turns = {name: [[Sample(torch.empty(0), [9.0, 9.0, 9.0, seconds], 0.0)]] for name, seconds in times.items()}
    assert contenders(turns) == ("chunked", "cpu_rank", "auto")
