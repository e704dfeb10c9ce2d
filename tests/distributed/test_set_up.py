"""Set-up on a machine without a C++ compiler."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, run_command
from tests.distributed.models import prose, save_model

COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|c[89]9)(-[\d.]+)?")
VARIABLES = ("CC", "CXX", "TORCH_EXTENSIONS_DIR")


def without_compilers(folder: Path) -> Path:
    """A folder with all commands of PATH but compilers."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for command in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / command.name
            # Those of an environment find it by where they lie.
            if not (COMPILERS.fullmatch(command.name) or link.is_symlink() or Path(place, "activate").exists()):
                link.symlink_to(command)
    return folder


@pytest.mark.full
def test_without_a_compiler_it_completes_and_ranks_run(tmp_path: Path) -> None:
    """The torch of this environment serves; what is compiled elsewhere is computed by PyTorch, to the same tokens."""
    checkout, document, out = tmp_path / "checkout", tmp_path / "document.txt", tmp_path / "out.json"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info"))
    there = ["env", "-C", checkout, *(word for name in VARIABLES for word in ("-u", name)), "bash"]
    environment = {"PATH": str(without_compilers(tmp_path / "bin")), "VIRTUAL_ENV": sys.prefix}
    made = run_command([*there, "scripts/setup.sh"], timeout=600, env=environment).check()
    assert "no C++ compiler (c++) on PATH: everything works" in made.stderr
    assert made.stdout == f"{checkout / '.venv' / 'bin' / 'python'}\n"
    document.write_text(prose(150))
    words = f"megakv run {save_model(tmp_path / 'model')} --tp 2 --dtype fp32 --prompt-file {document} --json {out}"
    command = f"source scripts/setup.sh && {words} --max-new-tokens 4 --compare"
    run = run_command([*there, "-c", command], timeout=240, env=environment).check()
    assert json.loads(out.read_text())["tokens_equal"] is True
    assert "cannot be had: [Errno 2] No such file or directory: 'c++'" in run.stderr
    assert not list((checkout / ".venv" / "torch_extensions").rglob("*.so"))
