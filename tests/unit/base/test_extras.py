"""Extras: what is installed on demand, and what an engine leaves alone that uses none of it."""

import configparser
import json
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from megakv.base import extras
from megakv.base.errors import MegaKVError
from megakv.base.extras import EXTRAS, require_extra
from megakv.launcher.command import main
from megakv.launcher.commands import EXTRA_OF, SUMMARIES
from tests.unit.test_imports import modules

ROOT = Path(__file__).parents[3]
ENGINE = """
import json, sys, megakv
with megakv.init_inference(sys.argv[1]) as engine:
    print(json.dumps(sorted(sys.modules)))
"""
SWITCHED_OFF = (
    "serving",
    "planner",
    "offload",
    "fairkv.mapping",
    "fairkv.placement",
    "fairkv.replicas",
    "tracking.page",
)
SECTIONS = {"megakv.offload", "megakv.offload.config", "megakv.offload.method"}
"""The section of the JSON, and the names that it allows."""


def test_the_distribution_names_the_same_packages() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = config["options.extras_require"]
    for extra, packages in EXTRAS.items():
        assert {re.split(r"[<>=]", line)[0] for line in declared[extra].split()} == set(packages)
    assert declared["all"].strip() == f"megakv[{','.join(EXTRAS)}]"
    needed = {re.split(r"[<>=]", line)[0] for line in config["options"]["install_requires"].split()}
    assert not needed & {package for packages in EXTRAS.values() for package in packages}
    assert set(EXTRA_OF) <= set(SUMMARIES) and set(EXTRA_OF.values()) <= set(EXTRAS)


def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "uvicorn" else util.find_spec(name))
    require_extra("plan", "this")
    with pytest.raises(MegaKVError, match=r"this needs uvicorn, which is not installed: pip install 'megakv\[serve\]'"):
        require_extra("serve", "this")
    assert main(["serve", "a-model"]) == 1
    assert "megakv serve needs uvicorn" in capsys.readouterr().err


def test_an_engine_loads_nothing_that_is_switched_off() -> None:
    words = [sys.executable, "-c", ENGINE, str(ROOT / "recipes/passkey/model")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    rooms = {name for name in loaded if name.startswith(tuple(f"megakv.{room}" for room in SWITCHED_OFF))}
    assert rooms - SECTIONS == set()
    assert not loaded & {"fastapi", "uvicorn", "openai", "matplotlib", "gguf", "llguidance", "prometheus_client"}
    assert len(loaded & modules().keys()) < 200
