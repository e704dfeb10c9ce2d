"""Times that no change may make worse, of one or several trees of this project in turn.

Each part runs a tree's own benchmark in a small form, with the tree's own environment. Trees alternate within a round,
so that a machine that grows slower does so for all. A time of a later tree that is over the first one's by more than
--tolerance, beyond both intervals, is listed as slower. Intervals are over processes: one may be 15% slower than the
next for as long as it lives, by where its memory lies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from harness.launch import Found, Rows, Summary, benchmark_alone
from harness.links import ROOT
from harness.options import Options
from harness.publish import show

Times = dict[str, list[float]]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "shorter prompts, fewer streams")
    options.names("--parts", PARTS, ",".join(PARTS), "what to measure")
    options.add("--trees", str(ROOT), "checkouts with environments, the earliest first, separated by commas")
    options.add("--rounds", {"": 3, "quick": 1}, "how often each part of each tree runs")
    options.add("--tolerance", 0.05, "how much slower a time may be", least=0)
    arguments = options.parse(argv)
    arguments.trees = [str(Path(tree).resolve()) for tree in arguments.trees.split(",")]
    for tree in arguments.trees:
        if not Path(tree, ".venv/bin/python").exists():
            options.error(f"--trees {tree}: no .venv there: run bash scripts/setup.sh in it")
    return arguments


class Run:
    """Commands of one tree, whose results lie in a folder of their own."""

    def __init__(self, tree: Path, folder: Path, *, quick: bool):
        self.quick, self._tree, self._folder = quick, tree, folder

    def rows(self, script: str, *words: str) -> Rows:
        """The rows that a benchmark of the tree writes."""
        rows: Rows = self.made(str(self._tree / ".venv/bin/python"), f"benchmarks/{script}", *words)["rows"]
        return rows

    def made(self, *command: str) -> Any:
        """Result that a command of the tree writes."""
        # A benchmark that was stopped goes on with what lies beside its result: every run has a folder of its own.
        path = Path(tempfile.mkdtemp(dir=self._folder)) / "found.json"
        environ = {**os.environ, "PATH": f"{self._tree}/.venv/bin:{os.environ['PATH']}", "VIRTUAL_ENV": ""}
        environ["TORCH_EXTENSIONS_DIR"] = str(self._tree / ".venv/torch_extensions")
        whole = [*command, "--json", str(path)]
        done = subprocess.run(whole, cwd=self._tree, env=environ, capture_output=True, text=True)
        if done.returncode or not path.exists():
            raise ValueError(f"{' '.join(command)} in {self._tree} ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(path.read_text())


def readme(run: Run) -> Times:
    """The README's first command, its set-up left out."""
    began = time.perf_counter()
    found = run.made("bash", "recipes/smollm2/run.sh")
    return {"whole": [time.perf_counter() - began], "ttft": [found["ttft_s"]], "ttit": [found["ttit_s"]]}


def tokens(run: Run) -> Times:
    """First and further tokens of one rank and of two, by type and length of the prompt."""
    lengths = "300,1024" if run.quick else "300,1024,7900"
    rows = run.rows("rivals.py", "--rivals", "megakv,megakv_cp2", "--lengths", lengths, "--repeats", "2")
    times: Times = {}
    for row in rows:
        where = f"{row['rival']} {row['dtype']} {row['context']}"
        times |= {f"ttft {where}": row["seconds"], f"ttit {where}": row["ttit_s"]}
    return times


def serving(run: Run) -> Times:
    """The longest gap and the reading beside streams, and seconds for a token of many streams together."""
    words = ["--quick"] if run.quick else []
    rows = run.rows("serving.py", *words, "--parts", "gaps,throughput", "--repeats", "2", "--new-tokens", "32")
    times: Times = {}
    for row in rows:
        if row["part"] == "gaps" and not row["decode_share"]:
            for name in ("longest_gap", "seconds", "alone_seconds"):
                times.setdefault(f"gaps {name}", []).append(row[name])
        elif row["part"] == "throughput":
            name = f"{row['streams']} streams{' drawn' * row['sampled']}"
            times.setdefault(f"token of {name}", []).append(1 / row["tokens_per_second"])
    return times


def offload(run: Run) -> Times:
    """A decoded token of every case and method."""
    names = ("part", "shape", "batch", "context", "new_tokens", "link_gb_s", "processes", "method")
    rows = run.rows("offload.py", "--quick")
    return {" ".join(str(row.get(name)) for name in names): row["decode_s"] for row in rows if row.get("decode_s")}


def prefill(run: Run) -> Times:
    """4,096 tokens on two ranks, by ring and by tensor parallelism."""
    words = ["--ranks", "2", "--context", "1024" if run.quick else "4096", "--methods", "pass_kv,tp", "--repeats", "3"]
    return {row["method"]: row["seconds"] for row in run.rows("prefill.py", *words)}


def runahead(run: Run) -> Times:
    """4,096 tokens down a chain of two ranks, its partition searched."""
    words = ["--ranks", "2", "--context", "1024" if run.quick else "4096", "--methods", "tsp,kvr_s,pass_kv,auto"]
    return {row["method"]: row["seconds"] for row in run.rows("runahead.py", *words, "--profile-seconds", "20")}


PARTS: dict[str, Callable[[Run], Times]] = {
    each.__name__: each for each in (readme, tokens, serving, offload, prefill, runahead)
}


def run(arguments: argparse.Namespace) -> Found:
    """Every part of every tree, round by round."""
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        for _, part, tree in product(range(arguments.rounds), arguments.parts, arguments.trees):
            began = time.perf_counter()
            times = PARTS[part](Run(Path(tree), Path(folder), quick=arguments.quick))
            print(f"{part} of {tree}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
            rows += [{"part": part, "tree": tree, "time": name, "seconds": found} for name, found in times.items()]
    return rows, report(arguments, rows), []


def report(arguments: argparse.Namespace, rows: Rows) -> Summary:
    """Medians by tree, and which times of later trees are slower than the first one's."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        found.setdefault((row["part"], row["time"]), {}).setdefault(row["tree"], []).append(median(row["seconds"]))
    first, *later = arguments.trees
    table, slower = [], []
    medians: Summary = {part: {} for part in arguments.parts}
    for (part, name), trees in found.items():
        medians[part][name] = {tree: median(each) for tree, each in trees.items()}
        base = trees.get(first, [])
        for tree in (each for each in later if each in trees and base):
            ratio = median(trees[tree]) / median(base)
            beyond = min(trees[tree]) > max(base) and ratio > 1 + arguments.tolerance
            table.append({"part": part, "time": name, "tree": tree, "ratio": ratio, "slower": beyond})
            slower += [f"{part}, {name}: {ratio:.2f}"] * beyond
    show(table, "part time tree ratio slower", "Times over those of the first tree")
    return {"medians_s": medians, "slower": slower}


if __name__ == "__main__":
    sys.exit(benchmark_alone("guard", parse_arguments(), run))
