"""Costs of compression in RULER's tasks for a real model, in the form of FairKV's Table 3; and whether exact is exact.

Exact tokens are compared with transformers' item by item. Then every compression method answers the same items at every
budget, and caches of 4 bits and FP8 weights beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.accuracy.answers import load_model, measure_compressed, measure_exact
from harness.accuracy.ruler import (
    EXACT,
    METHODS,
    TASKS,
    UNBUDGETED,
    by_length,
    charts,
    compare_tokens,
    read_items,
    rows_of,
)
from harness.launch import Found, Launch, Rows, benchmark, rank_environment
from harness.options import DTYPES, Options
from harness.publish import show, show_summary

from megakv.fairkv.profile import load_budgets

CACHE = Path(os.path.relpath(Path(__file__).resolve().parent.parent / ".cache"))  # As results show it
COMPRESSED = "compressed"
ONLY = (EXACT, COMPRESSED)
"""Tokens beside transformers', on one rank and on all, in fp32; scores."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks(timeout_s=8 * 3600.0)
    options.add("--quick", False, "one task, two items, two methods")
    model = str(CACHE / "smollm2" / "SmolLM2-135M-Instruct.Q4_1")
    options.add("--model", model, "directory, as recipes/smollm2/weights.py --unpacked makes it")
    options.add("--data", str(CACHE / "ruler" / "items.json"), "items, as scripts/ruler.sh writes them")
    options.numbers("--context", {"": "4096,8192", "quick": "4096"}, "lengths of prompts")
    usual = {"": "niah_single_1,noise_multikey,noise_multivalue,noise_multiquery", "quick": "niah_single_1"}
    options.names("--tasks", TASKS, usual, "which to ask")
    options.names("--only", ONLY, ",".join(ONLY), "parts")
    methods = {"": ",".join((*METHODS, *UNBUDGETED)), "quick": "snapkv,ada_snapkv"}
    options.names("--methods", (*METHODS, *UNBUDGETED), methods, "which to run beside exact attention")
    options.numbers("--budgets", {"": "128,256,512,1024", "quick": "128,512"}, "tokens that a KV head keeps on average")
    text = "of each task at the shortest length; at longer ones fewer, as many tokens"
    options.add("--items", {"": 8, "quick": 2}, text)
    options.add("--exact-items", {"": 2, "quick": 1}, "the same, for the comparison of tokens")
    options.add("--profile-items", {"": 2, "quick": 1}, "of each task at the shortest length, for the profile")
    options.add("--batch", 4, "prompts that are read together")
    options.choice("--dtype", DTYPES, "bf16", "of compressed runs and the profile; tokens are compared in fp32")
    text = "budgets of megakv fairkv profile, headkv's importances (default: measured, of --profile-items)"
    options.add("--profile", None, text, kind=str)
    arguments = options.parse(argv)
    if arguments.ranks < 2:
        options.error(f"--ranks {arguments.ranks}: allowed: 2 or more, to compare one rank with several")
    try:
        read_items(Path(arguments.data), arguments.tasks, arguments.context)
    except ValueError as error:
        options.error(str(error))
    return arguments


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    """One part, as one of its ranks."""
    exact = arguments.only == [EXACT]
    model, tokenizer = load_model(arguments.model, "fp32" if exact else arguments.dtype)
    items = read_items(Path(arguments.data), arguments.tasks, arguments.context)
    return (measure_exact if exact else measure_compressed)(arguments, world, model, tokenizer, items)


def profile_heads(arguments: argparse.Namespace, path: Path) -> None:
    """Measure what each KV head keeps, by the command that users have, of items that are not asked otherwise."""
    (config := path.with_name("config.json")).write_text(json.dumps({"dtype": arguments.dtype}))
    files = []
    for (_, task), several in read_items(Path(arguments.data), arguments.tasks, arguments.context[:1]).items():
        files.append(path.with_name(f"{task}.jsonl"))
        files[-1].write_text("".join(f"{json.dumps(item.text)}\n" for item in several[-arguments.profile_items :]))
    options = {"--model": arguments.model, "--config": config, "--json": path, "--ranks": 1}
    options |= {"--budget": arguments.budgets[len(arguments.budgets) // 2], "--threads": arguments.threads}
    command = [sys.executable, "-m", "megakv", "fairkv", "profile", "--prompts", *files, "--no-chat-template"]
    command += [word for option in options.items() for word in option]
    done = subprocess.run([*map(str, command)], timeout=arguments.timeout, env=rank_environment(arguments))
    if done.returncode:
        raise ValueError("megakv fairkv profile has failed")


def launches(arguments: argparse.Namespace, folder: Path) -> Iterator[Launch]:
    """Launches of all parts; the profile is measured between them."""
    if EXACT in arguments.only:
        for ranks in (1, arguments.ranks):
            yield Launch(ranks, ["--only", EXACT], f"exact tokens, {ranks} rank(s)")
    if COMPRESSED in arguments.only:
        if "headkv" in arguments.methods and not arguments.profile:
            arguments.profile = str(folder / "budgets.json")
            profile_heads(arguments, Path(arguments.profile))
        given = ["--profile", arguments.profile] if arguments.profile else []
        yield Launch(1, ["--only", COMPRESSED, *given], "scores by method and budget")


def report(arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    """Report scores, and whether tokens are equal."""
    tokens = {row["name"]: row["tokens"] for row in rows if "tokens" in row}
    rows = rows_of({row["name"]: row["answers"] for row in rows if "answers" in row})
    summary = compare_tokens(tokens) | by_length(rows)
    if arguments.profile and Path(arguments.profile).exists():
        profile = load_budgets(arguments.profile)
        summary["heads"] = {
            "budget": arguments.budgets[len(arguments.budgets) // 2],
            "mean_share": [[value / sum(row) for value in row] for row in profile.budgets],
            **profile.model_dump(mode="json", include={"method", "lengths", "data_sets", "busy_rates"}),
        }
    show(rows, "context method budget task items score kept:%", "Scores (FairKV's Table 3, row by row)")
    show_summary(summary, "exact_items", "exact_equal")
    return rows, summary, charts(rows, summary, f"{Path(arguments.model).name}, {arguments.dtype}")


if __name__ == "__main__":
    asked = parse_arguments()
    with TemporaryDirectory(prefix="megakv-benchmark-") as own:
        sys.exit(benchmark("accuracy", asked, measure_rank, report, launches(asked, Path(own))))
