"""``megakv plan --budgets --mapping``, and a run on real ranks by what it wrote: the tokens of heads in runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from megakv.cache.layer import contiguous_layer
from megakv.costmodel.presets import hardware
from megakv.fairkv.mapping import load_mapping
from megakv.launcher.command import main
from megakv.tracking.report import RunReport, load_report
from tests.distributed.launch import ROOT, run_ranks
from tests.distributed.models import prose, save_model

RUN = ROOT / "launcher" / "run.py"
PROMPT, SEQUENCES = 404, 512
LEAVES = [20.0, 18.0, 2.0, 1.0]


def small_machine() -> dict[str, Any]:
    """One on which so many sequences have room on two ranks only when they are compressed."""
    changes = {"memory_bytes": int(38e6), "host_memory_bytes": int(1e6), "dtype": "float32"}
    return hardware("h100-rdma").spec.model_copy(update=changes).model_dump(mode="json")


def answered(model: Path, config: dict[str, Any], folder: Path, name: str) -> RunReport:
    """A run by a configuration."""
    files = {kind: folder / f"{name}.{kind}.json" for kind in ("config", "report")}
    files["config"].write_text(json.dumps(config))
    words = ["--model", model, "--config", files["config"], "--prompt-file", folder / "prompt.txt"]
    run_ranks(RUN, *words, "--max-new-tokens", "12", "--json", files["report"], ranks=2, timeout=240).check()
    return load_report(files["report"])


def test_a_run_by_what_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, files = save_model(tmp_path / "model"), {}
    (tmp_path / "prompt.txt").write_text(prose(PROMPT))
    written = {
        # In each layer heads in runs leave most of the work to one rank.
        "budgets": {"model": "model", "budgets": [LEAVES, LEAVES[::-1]]},
        "hardware": small_machine(),
    }
    for name in ("budgets", "hardware", "mapping", "config"):
        files[name] = str(tmp_path / f"{name}.json")
        if name in written:
            Path(files[name]).write_text(json.dumps(written[name]))
    demand = ["--context", "4", "--cached", str(PROMPT - 4), "--batch", str(SEQUENCES), "--gpus", "2"]
    named = [word for name, path in files.items() for word in (f"--{name}", path)]
    assert main(["plan", "--model", str(model), *demand, *named, "--allow-lossy"]) == 0, capsys.readouterr().err
    mapping, config = load_mapping(files["mapping"]), json.loads(Path(files["config"]).read_text())
    assert mapping.time is not None and mapping.time.gain > 1 and config["tensor_parallel"] == {"tp_size": 2}
    assert all(layer != contiguous_layer(4, 2) for layer in mapping.layers)
    fairkv = config["megakv"]["fairkv"]
    assert fairkv.pop("mapping") == files["mapping"] and fairkv["budget"] < 1
    contiguous = answered(model, config, tmp_path, "contiguous")
    fairkv["mapping"] = files["mapping"]
    mapped = answered(model, config, tmp_path, "mapped")
    assert mapped.balance is not None and mapped.balance.mapping == files["mapping"]
    assert contiguous.balance is not None and contiguous.balance.mapping is None
    assert mapped.prompt_tokens == PROMPT and len(mapped.answers[0].tokens) == 12
    assert mapped.answers[0].tokens == contiguous.answers[0].tokens
