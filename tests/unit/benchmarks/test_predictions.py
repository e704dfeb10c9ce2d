"""benchmarks/predictions.py: errors and winners of results whose truth is known."""

import json
import random
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.harness.models import model_config
from benchmarks.harness.predictions import Predictions
from benchmarks.predictions import Time, main, read, summarise, times_of, unpredicted, winners
from megakv.costmodel.curves import Curve
from megakv.costmodel.shape import ModelShape
from tests.unit.benchmarks.running import BENCHMARKS
from tests.unit.costmodel.profiles import ideal
from tests.unit.costmodel.test_chain import attention_only


def row(method: str, predicted: object, measured: float, **setting: object) -> dict[str, object]:
    return {"method": method, "predicted_s": predicted, "seconds": [measured] * 3, "ranks": 4, **setting}


def test_errors_and_winners() -> None:
    rows = [row("a", 0.9, 1.0, context=1), row("b", 1.8, 2.0, context=1), row("c", None, 5.0, context=1)]
    rows += [row("a", 2.2, 2.0, context=2), row("b", 2.1, 2.2, context=2)]
    times = list(times_of(rows))
    assert [time.method for time in times] == ["a", "b", "a", "b"]
    assert times[0].error == pytest.approx(-0.1) and winners(times) == [True, False]
    near = [Time("s", "a", 1.0, 1.00), Time("s", "b", 0.9, 1.04)]
    assert winners(near) == []
    summary = summarise({"x": times}, {"y": "why"})
    assert summary["right_winner_share"] == 0.5 and summary["median_error"] == pytest.approx(0.1)
    assert summary["without_predictions"] == {"y": "why"}


def test_several_measures_of_a_row() -> None:
    scale = random.uniform(0.5, 2)
    rows = [
        row("cp", scale, 1.0, context=8) | {"ttit_seconds": [0.3, 0.1, 0.2], "predicted_ttit_s": 0.4},
        row("auto", {"single": 9.0}, 7.0, context=8),
    ]
    setting = "ranks 4, context 8"
    assert list(times_of(rows)) == [Time(setting, "cp", scale, 1.0), Time(f"TTIT, {setting}", "cp", 0.4, 0.2)]
    assert unpredicted(rows) == []
    corrected = row("kvpr", 1.0, 1.0, context=8) | {"cost_model_s": 0.9}
    assert list(times_of([corrected])) == [Time(setting, "kvpr", 0.9, 1.0)] and unpredicted([corrected]) == []
    assert unpredicted([row("b", None, 1.0), row("a", None, 1.0), row("b", 1.0, 1.0)]) == ["a", "b"]


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        read(tmp_path / "none")
    (tmp_path / "prefill.json").write_text(json.dumps({"benchmark": "prefill", "rows": [row("a", None, 1.0)]}))
    assert read(tmp_path) == ({}, {"prefill": "run without --profile-seconds"})
    (tmp_path / "strange.json").write_text("[]")
    with pytest.raises(ValueError, match=r"strange.json: not a benchmark's results"):
        read(tmp_path)


def test_the_answer_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    rows = [row("pass_kv", 0.95, 1.0, context=1), row("pass_q", 1.2, 1.1, context=1)]
    (tmp_path / "prefill.json").write_text(json.dumps({"benchmark": "prefill", "rows": rows}))
    kernel = {"benchmark": "attention_gpu", "rows": [row("flash", None, 1.0)]}
    (tmp_path / "attention_gpu.json").write_text(json.dumps(kernel))
    answer = tmp_path / "answer" / "all.json"
    answer.parent.mkdir()
    assert main(["--results", str(tmp_path), "--json", str(answer)]) == 0
    assert re.search("attention_gpu +it measures the kernel", capsys.readouterr().out)
    report = json.loads(answer.read_text())
    assert report["summary"]["benchmarks"]["prefill"]["right_winners"] == 1 and len(report["rows"]) == 2
    assert answer.with_suffix(".png").is_file()
    assert main(["--results", str(tmp_path / "none")]) == 2


def test_results_are_predicted_anew_from_their_profiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    sizes = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96, "vocab": 300, "dtype": "fp32"}
    context, cached, scale = random.randint(8, 500), random.randint(1, 500), random.uniform(0.5, 2)
    rows = {
        "prefill": row("pass_kv", 9.0, 1.0, context=context),
        "multiturn": row("pass_q", None, 1.0, rate="1gbit", context=9, new_tokens=context, cached_tokens=cached),
        "hosts": row("tp", 9.0, 1.0, rate="unlimited", context=context),
        "runahead": row("kvr_e", 9.0, 1.0, rate="free", kv_heads=2, context=8, noise="quiet", partition=[3, 2, 2, 1]),
    }
    profile = ideal(matmul=Curve.affine(1e-9, 1e9), exchange=Curve.affine(scale, 1e9))
    for name, entry in rows.items():
        args = {**sizes, "hosts": 2, "family": "llama", "context": [8]}
        results = {"benchmark": name, "args": args, "rows": [entry], "summary": {"kept": True}}
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
        kept = {"prefill": "4", "multiturn": "4-1gbit", "hosts": "4-unlimited", "runahead": "r4-kv2-free"}[name]
        profile.save(tmp_path / f"{name}.profiles" / f"{kept}.json")
    model = ModelShape.from_config(model_config(Namespace(**sizes)), dtype=torch.float32)
    found, hosts = Predictions(profile, model, 4), Predictions(profile, model, 4, tp_size=2)
    assert main(["--results", str(tmp_path), "--anew"]) == 0
    assert "predicted anew: hosts, multiturn, prefill, runahead" in capsys.readouterr().out
    for name, seconds in (
        ("prefill", found.prefill("pass_kv", context)),
        ("multiturn", found.prefill("pass_q", context, cached)),
        ("hosts", hosts.prefill("tp_gloo", context)),
        ("runahead", found.prefill("kvr_e", 8, partition=(3, 2, 2, 1))),
    ):
        results = json.loads((tmp_path / f"{name}.json").read_text())
        assert results["rows"] == [{**rows[name], "predicted_s": pytest.approx(seconds)}] and results["summary"]["kept"]
    # A profile that was lost is named.
    (tmp_path / "prefill.profiles" / "4.json").unlink()
    assert main(["--results", str(tmp_path), "--anew"]) == 2
    assert "prefill.profiles/4.json" in capsys.readouterr().err


def test_plain_models_are_predicted_whole() -> None:
    """In closed form: all that is predicted of a plain model but the attention is proportional to its tokens."""
    matmul = Curve(sizes=(1.0, 1e6), seconds=(1e-9, 1e-3))
    found = Predictions(ideal(matmul=matmul), attention_only(3, dense=50_000), 4)
    new = random.randint(2, 5000)
    dense = found.prefill("single", new)
    squares = 3 * ideal().attention[0].square(8, new)
    assert dense == pytest.approx(squares + (3 * 50_000) * new * 1e-9, rel=0.02)
    assert found.decode("single_idle", new) is None
    for method in ("tp", "tp_gloo", "pass_kv", "all_gather", "one_rank", "kvr_silent"):
        partition = (new, 7, 0, 5) if method == "kvr_silent" else None
        seconds = found.prefill(method, new + 12, partition=partition)
        assert seconds is not None and seconds > 0
