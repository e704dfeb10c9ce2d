"""Benchmarks started as a user starts them, with a model that takes no time."""

import os
import subprocess
import sys
from pathlib import Path

from tests.distributed.launch import Result, run_forked

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
FORKED = Path(__file__).with_name("forked.py")


def tiny(*, heads: int = 4, kv_heads: int | str = 2) -> list[str]:
    """Arguments of the model's shape."""
    shape = {"layers": 2, "hidden": 64, "heads": heads, "kv-heads": kv_heads, "intermediate": 96, "vocab": 300}
    return [word for name, value in shape.items() for word in (f"--{name}", str(value))]


def run_benchmark(script: str, *argv: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a script of the folder to its end."""
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, argv)], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip


def fork_benchmark(script: str, *argv: str | Path, timeout: float = 120, env: dict[str, str] | None = None) -> Result:
    """The same in processes that have imported everything, its ranks too."""
    result = run_forked(FORKED, [[BENCHMARKS / script, *argv]], timeout=timeout, env=env)
    assert not result.leftovers, result.leftovers
    return result
