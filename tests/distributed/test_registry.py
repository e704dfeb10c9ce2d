"""Methods of a file outside of the package: the JSON names it and them, on whatever launcher."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megakv.engine.config import load_config
from tests.distributed.launch import ROOT, run_command
from tests.distributed.models import prose, save_model

EXAMPLES = ROOT / "docs" / "examples"
PLUGINS = {"plugins": ["my_methods"]}
PATH = {"PYTHONPATH": str(EXAMPLES)}
REGISTERED = {"context_parallel.prefill": "own_last", "offload.method": "half", "fairkv.method": "every_nth"}


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


def test_the_launcher_imports_plugins(tmp_path: Path) -> None:
    """One of each kind: `check` lists them, and a run of two ranks is exact with a ring and an offload method."""
    sections = {
        "context_parallel": {"size": 2, "prefill": "own_last"},
        "offload": {"enabled": True, "method": "half", "host_gb": 0.05},
    }
    config, out = written(tmp_path, **sections, **PLUGINS), tmp_path / "out.json"
    words = [sys.executable, "-m", "megakv", "check", str(config), "--json", str(out)]
    run_command(words, timeout=120, env=PATH).check()
    listed = json.loads(out.read_text())["methods"]
    assert {key: listed[f"megakv.{key}"][-1] for key in REGISTERED} == REGISTERED
    document = tmp_path / "document.txt"
    document.write_text(prose(90))
    # Activations are fewer bytes than keys and values: recomputing may pay.
    model = save_model(tmp_path / "model", num_key_value_heads=8)
    words = [sys.executable, "-m", "megakv", "run", str(model), "--config", str(config), "--prompt-file", str(document)]
    words += ["--max-new-tokens", "4", "--compare", "--json", str(out)]
    run_command(words, timeout=240, env=PATH).check()
    found = json.loads(out.read_text())
    assert found["tokens_equal"] is True and set(found["methods"]["prefill"]) == {"own_last"}
    assert {step["plan"] for rank in found["ranks"] for step in rank["offload"]} == {"half"}
