"""Methods of a file outside of the package: the JSON names it and them, on whatever launcher."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import megakv
from megakv.engine.config import load_config
from megakv.offload.steady import Stream
from tests.distributed.launch import ROOT, run_command
from tests.distributed.models import prose, save_model

EXAMPLES = ROOT / "docs" / "examples"
PLUGINS = {"plugins": ["my_methods"]}
REGISTERED = {
    "context_parallel.prefill": "own_last",
    "offload.method": "half",
    "fairkv.method": "every_nth",
    "weights.format": "all_q4_1",
}


def written(tmp_path: Path, **section: Any) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"dtype": "fp32", "megakv": section}))
    return file


def test_without_its_plugin_a_method_is_unknown(tmp_path: Path) -> None:
    config = written(tmp_path, context_parallel={"prefill": "own_last"})
    with pytest.raises(ValueError, match="prefill = 'own_last': allowed: 'auto', 'pass_kv', "):
        load_config(config)
    with pytest.raises(ValueError, match="megakv.plugins names 'no_such_methods', which cannot be imported"):
        load_config(written(tmp_path, plugins=["no_such_methods"]))
    with pytest.raises(ValueError, match="megakv.plugins = 'my_methods': allowed: a list of modules"):
        load_config(written(tmp_path, plugins="my_methods"))


def test_the_launcher_imports_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind: `check` lists them, and a run of two ranks is exact with a ring and an offload method."""
    monkeypatch.chdir(EXAMPLES)
    sections = {
        "context_parallel": {"size": 2, "prefill": "own_last"},
        "offload": {"enabled": True, "method": "half", "host_gb": 0.05},
    }
    config, out = written(tmp_path, **sections, **PLUGINS), tmp_path / "out.json"
    words = [sys.executable, "-m", "megakv", "check", str(config), "--json", str(out)]
    run_command(words, timeout=120).check()
    listed = json.loads(out.read_text())["methods"]
    assert {key: listed[f"megakv.{key}"][-1] for key in REGISTERED} == REGISTERED
    document = tmp_path / "document.txt"
    document.write_text(prose(90))
    # Activations are fewer bytes than keys and values: recomputing may pay.
    model = save_model(tmp_path / "model", num_key_value_heads=8)
    words = [sys.executable, "-m", "megakv", "run", str(model), "--config", str(config), "--prompt-file", str(document)]
    words += ["--max-new-tokens", "4", "--compare", "--json", str(out)]
    run_command(words, timeout=240).check()
    found = json.loads(out.read_text())
    assert found["tokens_equal"] is True and set(found["methods"]["prefill"]) == {"own_last"}
    assert {step["plan"] for rank in found["ranks"] for step in rank["offload"]} == {"half"}


def test_a_ring_goes_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    config = written(tmp_path, plugins=["two_ways"], context_parallel={"size": 3, "prefill": "two_ways"})
    document, out = tmp_path / "document.txt", tmp_path / "out.json"
    document.write_text(prose(90))
    words = [sys.executable, "-m", "megakv", "run", str(save_model(tmp_path / "model")), "--config", str(config)]
    words += ["--prompt-file", str(document), "--max-new-tokens", "4", "--compare", "--json", str(out)]
    run_command(words, timeout=240).check()
    found = json.loads(out.read_text())
    assert found["tokens_equal"] is True and set(found["methods"]["prefill"]) == {"two_ways"}


def test_weights_take_a_format_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    model = save_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    (document := tmp_path / "document.txt").write_text(prose(90))
    words = [sys.executable, "-m", "megakv", "run", str(model), "--prompt-file", str(document), "--max-new-tokens", "4"]
    found = {}
    for form in ("q4_1", "all_q4_1"):
        config, out = written(tmp_path, **PLUGINS, weights={"format": form}), tmp_path / f"{form}.json"
        run_command([*words, "--config", str(config), "--json", str(out)], timeout=240).check()
        found[form] = json.loads(out.read_text())
        assert found[form]["weights"] == form
    # Embeddings and the head are in 8 bits where only layers are in 4.
    own, less = (set(found[form]["ranks"][0]["weight_bytes"]) for form in ("q4_1", "all_q4_1"))
    assert own - less == {"Q8_0"} and "Q4_1" in less


def test_keys_that_travel_are_not_decoded_with_behind_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    section = {"context_parallel": {"size": 2, "decode": "own_last"}, "fairkv": {"budget": 0.5}}
    words = [sys.executable, "-m", "megakv", "check", str(written(tmp_path, **PLUGINS, **section))]
    result = run_command(words, timeout=120)
    assert result.returncode == 1 and "decode = 'own_last' sends keys; megakv.fairkv's stay" in result.stderr


def test_a_method_is_registered_by_what_makes_it() -> None:
    for method in (lambda call: call, str.join):
        with pytest.raises(ValueError, match="attention method 'made': .* takes arguments; allowed: its class"):
            megakv.register_prefill_method("made", method)  # type: ignore[arg-type, unused-ignore]


def test_an_offload_method_is_registered_made() -> None:
    with pytest.raises(ValueError, match="offload method 'made': .*Stream'> is a class; allowed: .* Stream\\(\\)"):
        megakv.register_offload_method("made", Stream)  # type: ignore[arg-type, unused-ignore]
