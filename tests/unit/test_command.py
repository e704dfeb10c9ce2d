"""The ``megakv`` command: every subcommand is described, and none is imported before it is asked for."""

import importlib
import subprocess
import sys

import pytest

from megakv.attention import runahead
from megakv.costmodel import simulated_prefill
from megakv.fairkv.methods import METHODS
from megakv.launcher.command import main
from megakv.launcher.commands import SUMMARIES, fairkv_profile, simulate


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
    assert simulate.METHODS == simulated_prefill.METHODS and simulate.CHUNK_TOKENS == runahead.CHUNK_TOKENS
    assert fairkv_profile.UNEVEN == tuple(name for name, method in METHODS.items() if method.uneven)


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_command_says_what_it_takes(name, capsys):
    assert callable(importlib.import_module(f"megakv.launcher.commands.{name.replace('-', '_')}").run)
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: megakv {name}")


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as end:
        main(["plam"])
    assert end.value.code == 2
    assert "plan" in capsys.readouterr().err
