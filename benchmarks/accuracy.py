"""Costs of compression in RULER's tasks for a real model, in the form of FairKV's Table 3; and whether exact is exact.

Exact tokens are compared with transformers' item by item. Then every compression method answers the same items at every
budget, and caches of 4 bits and FP8 weights beside them. Every batch of items is kept when it is done: the same command
goes on from there, and with more --items adds to what was measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
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
    score_tables,
)
from harness.launch import Found, Launch, Rows, benchmark_kept, is_rank, rank_environment
from harness.options import DTYPES, Options
from harness.publish import Parts, align, show_summary

from megakv.fairkv.profile import load_budgets

CACHE = Path(os.path.relpath(Path(__file__).resolve().parent.parent / ".cache"))  # As results show it
COMPRESSED, PROFILE = "compressed", "profile"
ONLY = (EXACT, PROFILE, COMPRESSED)
"""Tokens beside transformers', on one rank and on all, in fp32; budgets by megakv fairkv profile; scores."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks(timeout_s=8 * 3600.0)
    options.add("--quick", False, "one task, two items, two methods")
    model = str(CACHE / "smollm2" / "SmolLM2-135M-Instruct.Q4_1")
    options.add("--model", model, "directory, as recipes/smollm2/weights.py makes it")
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
    options.add("--parts", None, "folder where batches are kept (default: FILE.parts of --json)", kind=str)
    arguments = options.parse(argv)
    if arguments.ranks < 2:
        options.error(f"--ranks {arguments.ranks}: allowed: 2 or more, to compare one rank with several")
    if not is_rank() and "headkv" in arguments.methods and arguments.only in ([COMPRESSED], [EXACT, COMPRESSED]):
        options.error("--methods headkv takes its budgets from the profile: add profile to --only, or leave headkv out")
    try:
        read_items(Path(arguments.data), arguments.tasks, arguments.context)
    except ValueError as error:
        options.error(str(error))
    return arguments


def identity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings that must be the same for batches to be kept side by side."""
    data = hashlib.sha256(Path(arguments.data).read_bytes()).hexdigest()
    return {"model": Path(arguments.model).name, "data": data, "dtype": arguments.dtype, "batch": arguments.batch}


def profile_path(parts: Any) -> Path:
    return Path(parts.folder / PROFILE / "budgets.json")


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    """One part, as one of its ranks; what is measured is kept at once."""
    parts, exact = Parts(Path(arguments.parts), identity(arguments)), arguments.only == [EXACT]
    model, tokenizer = load_model(arguments.model, "fp32" if exact else arguments.dtype)
    items = read_items(Path(arguments.data), arguments.tasks, arguments.context)
    measure: Any = measure_exact if exact else partial(measure_compressed, importance=profile_path(parts))
    measure(arguments, world, parts, model, tokenizer, items)
    return []


def profile_heads(arguments: argparse.Namespace, parts: Any) -> None:
    """Measure what each KV head keeps, by the command that users have, of items that are not asked otherwise."""
    path = profile_path(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
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


def launches(arguments: argparse.Namespace, parts: Any) -> Iterator[Launch]:
    """Launches of all parts; the profile is measured between them."""
    kept = ["--parts", str(parts.folder.resolve())]
    if EXACT in arguments.only:
        for ranks in (1, arguments.ranks):
            yield Launch(ranks, ["--only", EXACT, *kept], f"exact tokens, {ranks} rank(s)")
    if PROFILE in arguments.only and not profile_path(parts).exists():
        profile_heads(arguments, parts)
    if COMPRESSED in arguments.only:
        yield Launch(1, ["--only", COMPRESSED, *kept], "scores by method and budget")


def report(parts: Any, arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    """Report scores and tokens that are kept."""
    rows = rows_of({name: part["answers"] for name, part in parts.all(f"{COMPRESSED}-").items()})
    tokens = {name: part["tokens"] for name, part in parts.all(f"{EXACT}-").items()}
    summary = compare_tokens(tokens) | by_length(rows)
    if profile_path(parts).exists():
        profile = load_budgets(str(profile_path(parts)))
        summary["heads"] = {
            "budget": arguments.budgets[len(arguments.budgets) // 2],
            "mean_share": [[value / sum(row) for value in row] for row in profile.budgets],
            **profile.model_dump(mode="json", include={"method", "lengths", "data_sets", "busy_rates"}),
        }
    for title, table in score_tables(rows):
        print(f"\n{title}\n{align(table)}")
    show_summary(summary, "exact_items", "exact_equal", "best_method_at_budget")
    return rows, summary, charts(rows, summary, f"{Path(arguments.model).name}, {arguments.dtype}")


if __name__ == "__main__":
    asked = parse_arguments()
    sys.exit(benchmark_kept("accuracy", asked, identity(asked), measure_rank, report, launches))
