"""The ``megakv`` command: every subcommand is described, and none is imported before it is asked for."""

import importlib
import subprocess
import sys

import pytest

from megakv.launcher.command import main
from megakv.launcher.commands import SUMMARIES


def test_help_needs_none_of_the_large_libraries():
    script = """
import sys
from megakv.launcher.command import main
try:
    main(["--help"])
except SystemExit as end:
    print("loaded", sorted({"torch", "deepspeed", "transformers", "numpy"} & set(sys.modules)), end.code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded [] 0", done.stdout + done.stderr
    assert all(name in done.stdout for name in SUMMARIES)


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
