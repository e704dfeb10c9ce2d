"""A ring method is one file and one line: the JSON takes its name, `megakv check` lists it, its tokens are exact."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest

from megakv.attention.methods import METHODS, MethodEntry
from megakv.engine.config import load_config
from megakv.launcher.commands import check
from tests.distributed.launch import run_ranks
from tests.distributed.toy_ring import ToyRing

SCRIPT = Path(__file__).parent / "ranks" / "toy_ring.py"
KEY = "megakv.context_parallel.prefill"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    parallel = {"size": 2, "prefill": "toy_ring", "decode": "toy_ring"}
    file.write_text(json.dumps({"dtype": "fp32", "megakv": {"context_parallel": parallel}}))
    return file


def test_a_line_is_all_that_the_json_needs(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{KEY} = 'toy_ring': allowed: 'auto', 'pass_kv', ")):
        load_config(config)
    monkeypatch.setitem(METHODS, "toy_ring", MethodEntry(ToyRing, prefill=True, decode=True))
    listed = check.run(Namespace(config=config))["methods"]
    assert listed[KEY] == ["auto", *(name for name, entry in METHODS.items() if entry.prefill)]
    assert listed[KEY][-1] == listed["megakv.context_parallel.decode"][-1] == "toy_ring"


def test_its_tokens_are_the_plain_models(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_ranks(SCRIPT, config, out, ranks=2, timeout=200).check()
    found = json.loads(out.read_text())
    assert found["same"] and "toy_ring" in found["traffic"]
