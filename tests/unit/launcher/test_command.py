"""The ``megakv`` command: every subcommand is described, and none is imported before it is asked for."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megakv.attention import runahead
from megakv.costmodel import prefill
from megakv.fairkv.methods import METHODS
from megakv.launcher.command import main
from megakv.launcher.commands import SUMMARIES, fairkv, fairkv_profile, simulate
from megakv.launcher.process import UNREAD
from tests.distributed.launch import ROOT


def test_help_needs_none_of_the_large_libraries():
    script = """
import sys
from megakv.launcher.command import main
from megakv.launcher.commands import SUMMARIES
for words in ([], *([name] for name in SUMMARIES)):
    try:
        main([*words, "--help"])
    except SystemExit as end:
        print("loaded", sorted({"torch", "deepspeed", "transformers", "numpy"} & set(sys.modules)), end.code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    loaded = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert loaded == ["loaded [] 0"] * (1 + len(SUMMARIES)), done.stdout + done.stderr
    assert all(name in done.stdout for name in SUMMARIES)


def test_what_help_names_is_what_there_is():
    """Help does not import the methods that it names."""
    assert simulate.METHODS == prefill.METHODS and simulate.CHUNK_TOKENS == runahead.CHUNK_TOKENS
    assert fairkv_profile.UNEVEN == tuple(name for name, method in METHODS.items() if method.uneven)


@pytest.mark.parametrize("name", SUMMARIES)
def test_choices_that_help_explains_are_there(name):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"megakv.launcher.commands.{name.replace('-', '_')}").add_arguments(parser)
    for action in parser._actions:
        explained = re.findall(r"(?:^|; )(\w+):", action.help or "") if action.choices else ()
        assert set(explained) <= set(action.choices or ()), action.dest


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_command_says_what_it_takes(name, capsys):
    assert callable(importlib.import_module(f"megakv.launcher.commands.{name.replace('-', '_')}").run)
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: megakv {name}")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"context_parallel": {"policy": "alg1", "profile": "none.json"}}, "profile = 'none.json' cannot be read"),
        ({"context_parallel": {"policy": "fitted", "fit": "none.json"}}, "fit = 'none.json' cannot be read"),
        ({"runahead": {"table": "none.json"}}, "megakv.runahead.table = 'none.json' cannot be read"),
        ({"fairkv": {"mapping": "none.json"}}, "megakv.fairkv.mapping = 'none.json' cannot be read"),
        ({"fairkv": {"budget": 0.5, "method": "headkv", "importance": "run.json"}}, None),
        (
            {"fairkv": {"budget": 9, "method": "headkv", "importance": "run.json"}},
            "budget = 9 tokens per head is below",
        ),
    ],
)
def test_check_refuses_what_a_start_refuses(section, message, tmp_path, monkeypatch, capsys):
    """All that it can tell without a model."""
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(json.dumps({"dtype": "fp32", "megakv": section}))
    assert main(["check", "run.json"]) == int(message is not None)
    assert (message or "") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "now"),
    [
        (["fairkv-map", "--tp", "2"], "megakv fairkv-map: it is megakv fairkv map now"),
        (["fairkv-profile"], "megakv fairkv-profile: it is megakv fairkv profile now"),
        (
            ["fairkv", "some/model", "--tp", "2"],
            "megakv fairkv some/model: 'some/model' is no verb; allowed: place, profile, map",
        ),
        (["fairkv", "--tp", "2", "some/model"], "what was megakv fairkv MODEL is megakv fairkv place MODEL now"),
    ],
)
def test_former_names_are_refused_with_the_present_ones(words, now, capsys):
    assert main(words) == 1
    assert now in capsys.readouterr().err


@pytest.mark.parametrize("verb", fairkv.VERBS)
def test_every_verb_says_what_it_takes(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main(["fairkv", verb, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: megakv fairkv {verb}")


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as end:
        main(["plam"])
    assert end.value.code == 2
    assert "plan" in capsys.readouterr().err


PRINTING = """
from megakv.launcher.process import report_errors
with report_errors():
    print("much")
"""


@pytest.mark.parametrize("words", [["-m", "megakv", "run", "none", "--question", "why"], ["-c", PRINTING]])
def test_what_nobody_reads_is_no_error(words):
    """Of a command, and of a rank."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *words], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (UNREAD, "")


def test_a_result_stands_alone_on_standard_output():
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    words = [sys.executable, "-m", "megakv", "check", str(ROOT / "recipes" / "passkey" / "cp2_tp1.json")]
    done = subprocess.run(words, capture_output=True, env=environment, timeout=60)
    assert json.loads(done.stdout)["ranks"] == 2, done.stdout
