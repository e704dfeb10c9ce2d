"""Whole engines, drawn at random: whatever is asked of one, however it is configured, it answers as the plain model."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "random_engines.py"
CASES = {4: 10, 3: 6, 2: 28, 1: 16}
"""By number of ranks, of the quick set. More ranks come first: fewer go on with some of their sessions."""
FULL = 1000
SLICE = 50
"""Cases of a launch, at most."""
REFUSED, TIES = 0.25, 0.02
"""Of all cases, at most."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What launches on fewer ranks find of those before."""
    return tmp_path_factory.mktemp("random")


def number(ranks: int, config: pytest.Config) -> int:
    """How many cases are run on so many ranks."""
    given, quick = config.getoption("--cases"), CASES[ranks]
    if given is not None:
        return int(given)
    return quick * FULL // sum(CASES.values()) if config.getoption("--full") else quick


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", CASES)
def test_random_engines_are_the_plain_model(
    ranks: int, folder: Path, fresh_numbers: int, pytestconfig: pytest.Config
) -> None:
    lines: list[dict[str, Any]] = []
    count = number(ranks, pytestconfig)
    for start in range(0, count, SLICE):
        seeds = [fresh_numbers + index for index in range(start, min(start + SLICE, count))]
        out = folder / f"{ranks}-{start}.jsonl"
        result = run_ranks(SCRIPT, out, folder, ",".join(map(str, seeds)), ranks=ranks, timeout=20 * len(seeds) + 120)
        lines += [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        assert result.returncode == 0, (
            f"{result.returncode} at, or in plain transformers after, {(folder / 'running').read_text()}\n"
            f"{replay(lines, ranks)}\n{result.stderr[-6000:]}"
        )
        result.check()
    kinds = Counter(next((kind for kind in ("failure", "tie", "refused") if kind in line), "equal") for line in lines)
    print(f"{len(lines)} cases on {ranks} ranks: {dict(kinds)}; actions:", sum(x.get("actions", 0) for x in lines))
    print("refused:", *sorted({line["refused"] for line in lines if "refused" in line}), sep="\n  ")
    failures = replay(lines, ranks)
    assert not failures, failures
    assert len(lines) >= count
    assert kinds["refused"] <= REFUSED * len(lines) + 3 and kinds["tie"] <= TIES * len(lines) + 1, kinds


def replay(lines: list[dict[str, Any]], ranks: int) -> str:
    """What went wrong, and how to run each of them again, after the cases on more ranks that it may go on from."""
    command = "MEGAKV_TEST_SEED={} pytest 'tests/distributed/test_random_engines.py' -k '{}' --cases 1"
    which = " or ".join(str(more) for more in CASES if more >= ranks)
    return "\n\n".join(
        f"{command.format(line['seed'], which)}\n"
        + "\n".join(f"{name}: {text}" for name, text in line.items() if "failure" in name)
        for line in lines
        if any("failure" in name for name in line)
    )
