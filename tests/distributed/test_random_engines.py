"""Whole engines, drawn at random: whatever is asked of one, however it is configured, it answers as the plain model.

Where its settings lose something, it answers as one rank that loses the same, and offloads nothing. What is refused is
refused by a law.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megakv.base.errors import LAWS
from tests.distributed.launch import run_ranks
from tests.distributed.random_cases import draw
from tests.distributed.random_sections import MISSING

SCRIPT = Path(__file__).parent / "ranks" / "random_engines.py"
CASES = {4: 4, 3: 2, 2: 14, 1: 18}
"""By number of ranks, of the quick set. More ranks come first: fewer go on with some of their sessions."""
FULL = 2000
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
        out, given, limit = folder / f"{ranks}-{start}.jsonl", ",".join(map(str, seeds)), 20 * len(seeds) + 120
        if any(part.lossy for seed in seeds for part in draw(seed, ranks).parts):
            run_ranks(SCRIPT, out, folder, given, str(ranks), ranks=1, timeout=limit).check()
        result = run_ranks(SCRIPT, out, folder, given, ranks=ranks, timeout=limit)
        lines += [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        assert result.returncode == 0, (
            f"{result.returncode} at, or in plain transformers after, {(folder / 'running').read_text()}\n"
            f"{replay(lines, ranks)}\n{result.stderr[-6000:]}"
        )
        result.check()
    judge_doubts(lines, folder)
    kinds = Counter(next((kind for kind in ("failure", "tie", "refused") if kind in line), "equal") for line in lines)
    print(f"{len(lines)} cases on {ranks} ranks: {dict(kinds)}; actions:", sum(x.get("actions", 0) for x in lines))
    print("refused:", *sorted({line["refused"] for line in lines if "refused" in line}), sep="\n  ")
    failures = replay(lines, ranks)
    assert not failures, failures
    for refused, law in (("refused", "law"), ("refused neighbour", "law of the neighbour")):
        for line in (line for line in lines if refused in line):
            assert line[law] in LAWS or any(re.search(each, line[refused]) for each in MISSING), line
    assert len(lines) >= count
    assert kinds["refused"] <= REFUSED * len(lines) + 3 and kinds["tie"] <= TIES * len(lines) + 1, kinds


def judge_doubts(lines: list[dict[str, Any]], folder: Path) -> None:
    """Make a tie or a failure of every doubt."""
    doubts = [line for line in lines if "doubt" in line]
    if doubts:
        out = folder / "doubts.jsonl"
        run_ranks(SCRIPT, out, folder, ranks=1, timeout=300 * len(doubts)).check()
        verdicts = [json.loads(line) for line in out.read_text().splitlines()]
        ties = {(verdict["seed"], verdict["ranks"]) for verdict in verdicts if verdict["tie"]}
        for line in doubts:
            line["tie" if (line["seed"], line["ranks"]) in ties else "failure"] = line.pop("doubt")


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
