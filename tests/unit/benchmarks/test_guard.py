"""The guard: what counts as slower, and which trees it takes."""

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("guard")


def test_slower_is_beyond_both_intervals_and_the_tolerance(guard: Any) -> None:
    times = {
        "same": ([1.0, 1.1], [1.05, 1.0]),
        "slower": ([1.0, 1.1], [1.2, 1.3]),
        "a little": ([1.0, 1.0], [1.04, 1.04]),
    }
    rows = [
        {"part": "tokens", "tree": tree, "time": name, "seconds": seconds}
        for name, pair in times.items()
        for tree, seconds in zip(("before", "after"), pair, strict=True)
    ]
    arguments = Namespace(trees=["before", "after"], parts=["tokens"], tolerance=0.05)
    summary = guard.report(arguments, rows)
    assert summary["slower"] == ["tokens, slower: 1.19"]
    assert summary["medians_s"]["tokens"]["same"] == {"before": 1.05, "after": 1.025}


def test_a_tree_needs_its_environment(guard: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        guard.parse_arguments(["--trees", str(tmp_path), "--json", f"{tmp_path}/guard.json"])
    assert "no .venv there" in capsys.readouterr().err
