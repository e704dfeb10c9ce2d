"""Benchmarks started as a user starts them, with a model that takes no time."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from tests.distributed.launch import Result, run_forked
from tests.patience import Patience
from tests.stacks import show, write_stacks

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
FORKED = Path(__file__).with_name("forked.py")


def tiny(*, heads: int = 4, kv_heads: int | str = 2) -> list[str]:
    """Arguments of the model's shape."""
    shape = {"layers": 2, "hidden": 64, "heads": heads, "kv-heads": kv_heads, "intermediate": 96, "vocab": 300}
    return [word for name, value in shape.items() for word in (f"--{name}", str(value))]


def run_benchmark(script: str, *argv: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a script of the folder to its end."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, argv)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        stdout, stderr = outputs(process, timeout)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def outputs(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """What it writes to its end; one that has not ended in time says where it stands."""
    patience = Patience(timeout)
    while True:
        try:
            return process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            if patience.over:
                started = psutil.Process(process.pid)
                write_stacks([*started.children(recursive=True), started])
                show(process.communicate()[1])
                raise


def refusal(script: str, argv: Sequence[str | Path]) -> str:
    """What a script of the folder says of arguments that it refuses, before it does anything."""
    module, said = import_module(f"benchmarks.{script.removesuffix('.py')}"), io.StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stderr(said):
        module.parse_arguments([*map(str, argv)])
    assert ended.value.code == 2
    return said.getvalue()


def fork_benchmark(script: str, *argv: str | Path, timeout: float = 120, env: dict[str, str] | None = None) -> Result:
    """The same in processes that have imported everything, its ranks too."""
    result = run_forked(FORKED, [[BENCHMARKS / script, *argv]], timeout=timeout, env=env)
    assert not result.leftovers, result.leftovers
    return result
