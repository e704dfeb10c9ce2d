"""What compression costs a real model in RULER's tasks, in the form of FairKV's Table 3; and whether exact is exact.

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
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.launch import Launch, Rows, is_rank, launch_all, quiet, rank_environment, serve
from harness.options import DTYPES, Options
from harness.ruler import EXACT, METHODS, TASKS, UNBUDGETED, read_items

if TYPE_CHECKING:
    from harness.publish import Parts
    from harness.ruler import Item
    from harness.world import World

CACHE = Path(os.path.relpath(Path(__file__).resolve().parent.parent / ".cache"))  # As results show it
MODEL = CACHE / "smollm2" / "SmolLM2-135M-Instruct.Q4_1"
COMPRESSED, PROFILE = "compressed", "profile"
ONLY = {
    EXACT: "transformers' tokens against MegaKV's on one rank and on all, in fp32",
    PROFILE: "budgets of KV heads, by megakv fairkv-profile",
    COMPRESSED: "scores by method and budget",
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks(timeout_s=8 * 3600.0)
    options.add("--quick", False, "one task, two items, two methods")
    options.add("--model", str(MODEL), "directory, as recipes/smollm2/weights.py makes it")
    options.add("--data", str(CACHE / "ruler" / "items.json"), "items, as scripts/ruler.sh writes them")
    options.numbers("--context", {"": "4096,8192", "quick": "4096"}, "lengths of prompts")
    usual = {"": "niah_single_1,noise_multikey,noise_multivalue,noise_multiquery", "quick": "niah_single_1"}
    options.names("--tasks", TASKS, usual, "which to ask")
    options.names("--only", ONLY, ",".join(ONLY), "parts")
    methods = {"": ",".join((*METHODS, *UNBUDGETED)), "quick": "snapkv,ada_snapkv"}
    options.names("--methods", (*METHODS, *UNBUDGETED), methods, "which to run beside exact attention")
    options.numbers("--budgets", {"": "128,256,512,1024", "quick": "128,512"}, "tokens that a KV head keeps on average")
    options.add(
        "--items", {"": 8, "quick": 2}, "of each task at the shortest length; at longer ones fewer, as many tokens"
    )
    options.add("--exact-items", {"": 2, "quick": 1}, "the same, for the comparison of tokens")
    options.add("--profile-items", {"": 2, "quick": 1}, "of each task at the shortest length, for the profile")
    options.add("--batch", 4, "prompts that are read together")
    options.choice("--dtype", DTYPES, "bf16", "of compressed runs and the profile; tokens are compared in fp32")
    options.add("--parts", None, "folder where batches are kept (default: FILE.parts of --json)", kind=str)
    arguments = options.parse(argv)
    if arguments.ranks < 2:
        options.error(f"--ranks {arguments.ranks}: allowed: 2 or more, to compare one rank with several")
    if arguments.parts is None and arguments.json:
        arguments.parts = str(Path(arguments.json).with_suffix(".parts"))
    if not is_rank() and "headkv" in arguments.methods and arguments.only in ([COMPRESSED], [EXACT, COMPRESSED]):
        options.error("--methods headkv takes its budgets from the profile: add profile to --only, or leave headkv out")
    return arguments


def identity(arguments: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for batches to be kept side by side."""
    data = hashlib.sha256(Path(arguments.data).read_bytes()).hexdigest()
    return {"model": Path(arguments.model).name, "data": data, "dtype": arguments.dtype, "batch": arguments.batch}


def counted(arguments: argparse.Namespace, asked: int, context: int) -> int:
    """Items of a length: of a longer one fewer, as many tokens together."""
    return max(1, asked * int(arguments.context[0]) // context)


def batches(
    arguments: argparse.Namespace, items: dict[tuple[int, str], list[Item]]
) -> Iterator[tuple[str, list[Item]]]:
    """By name, some of each task and length first, so that a run that was ended has some of everything."""
    for start in range(0, arguments.items, arguments.batch):
        for (context, task), several in items.items():
            if start < (count := counted(arguments, arguments.items, context)):
                yield f"{COMPRESSED}-{context}-{task}-{start}", several[start : min(count, start + arguments.batch)]


def measure_exact(arguments: argparse.Namespace, world: World, parts: Parts, load: Any) -> None:
    """Tokens of every exact item: of MegaKV on these ranks, and on one rank of transformers too."""
    from harness.answers import exact_tokens
    from harness.methods import Peer, Peers
    from tqdm import tqdm

    model, tokenizer, items = load("fp32")
    asked = {
        f"{EXACT}-{world.size}-{context}-{task}-{index}": item
        for (context, task), several in items.items()
        for index, item in enumerate(several[: counted(arguments, arguments.exact_items, context)])
    }
    with Peers(model, world) as peers:
        ways = {"megakv": peers.engine(EXACT, {}).generate}
        if world.size == 1:
            ways["transformers"] = Peer(model).model.generate
        for name, item in tqdm(asked.items(), desc=f"exact, {world.size} rank(s)", disable=world.rank > 0):
            if world.gather(parts.read(name) is None)[0]:
                tokens = {way: exact_tokens(generate, item, tokenizer) for way, generate in ways.items()}
                if world.rank == 0:
                    parts.write(name, {"tokens": tokens})


def measure_compressed(arguments: argparse.Namespace, world: World, parts: Parts, load: Any) -> None:
    """Answers of every batch in every way that is not kept yet."""
    from harness.answers import answer, ways_of
    from harness.methods import Peers
    from tqdm import tqdm

    model, tokenizer, items = load(arguments.dtype)
    ways = ways_of([EXACT, *arguments.methods], arguments.budgets, profile_path(parts))
    with Peers(model, world) as peers:
        for name, batch in (bar := tqdm(list(batches(arguments, items)), desc=COMPRESSED, unit="batch")):
            bar.set_postfix_str(name)
            kept = (parts.read(name) or {"answers": {}})["answers"]
            asked = ways if batch[0].context == arguments.context[0] else [way for way in ways if way.shares_reading]
            missing = [way for way in asked if len(kept.get(way.name, ())) < len(batch)]
            if missing:
                parts.write(name, {"answers": kept | answer(peers, missing, batch, tokenizer)})


def measure_rank(arguments: argparse.Namespace, world: World) -> Rows:
    """One part, as one of its ranks; what is measured is kept at once."""
    from harness.answers import load_model
    from harness.publish import Parts

    def load(dtype: str) -> Any:
        model, tokenizer = load_model(arguments.model, dtype)
        return model, tokenizer, read_items(Path(arguments.data), arguments.tasks, arguments.context)

    measure = measure_exact if arguments.only == [EXACT] else measure_compressed
    measure(arguments, world, Parts(Path(arguments.parts), identity(arguments)), load)
    return []


def profiled(arguments: argparse.Namespace) -> int:
    """The profile's budget."""
    return int(arguments.budgets[len(arguments.budgets) // 2])


def profile_path(parts: Parts) -> Path:
    return parts.folder / PROFILE / "budgets.json"


def profile_heads(arguments: argparse.Namespace, parts: Parts) -> None:
    """What each KV head keeps, by the command that users have, of items that are not asked otherwise."""
    path = profile_path(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    (config := path.with_name("config.json")).write_text(json.dumps({"dtype": arguments.dtype}))
    files = []
    items = read_items(Path(arguments.data), arguments.tasks, arguments.context[:1])
    for (_, task), several in items.items():
        files.append(path.with_name(f"{task}.jsonl"))
        lines = [json.dumps(item.text) for item in several[-arguments.profile_items :]]
        files[-1].write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "megakv", "fairkv-profile", "--model", arguments.model, "--config", str(config)]
    command += [
        "--prompts",
        *map(str, files),
        "--no-chat-template",
        "--budget",
        str(profiled(arguments)),
        "--json",
        str(path),
    ]
    command += ["--ranks", "1", "--threads", str(arguments.threads)]
    done = subprocess.run(command, timeout=arguments.timeout, env=rank_environment(arguments))
    if done.returncode:
        raise ValueError("megakv fairkv-profile has failed")


def launches(arguments: argparse.Namespace, parts: Parts) -> Iterator[Launch]:
    """Of all parts, the profile is measured between them."""
    kept = ["--parts", str(parts.folder.resolve())]
    if EXACT in arguments.only:
        yield Launch(1, ["--only", EXACT, *kept], "exact tokens, one rank and transformers")
        yield Launch(arguments.ranks, ["--only", EXACT, *kept], f"exact tokens, {arguments.ranks} ranks")
    if PROFILE in arguments.only and not profile_path(parts).exists():
        profile_heads(arguments, parts)
    if COMPRESSED in arguments.only:
        yield Launch(1, ["--only", COMPRESSED, *kept], "scores by method and budget")


def report(arguments: argparse.Namespace, machine: dict[str, Any], parts: Parts) -> int:
    """Show and write what is kept; 1 where a token differs."""
    from harness.charts import Chart, lines
    from harness.publish import align, publish, show_summary
    from harness.ruler import ALL, by_length, compare_tokens, rows_of, score_tables

    from megakv.fairkv.figures import draw_profile
    from megakv.fairkv.profile import load_budgets

    rows = rows_of({name: part["answers"] for name, part in parts.all(f"{COMPRESSED}-").items()})
    tokens = {name: part["tokens"] for name, part in parts.all(f"{EXACT}-").items()}
    summary = compare_tokens(tokens) | by_length(rows)
    charts = []
    for context in summary["accuracy"]:
        points = [row for row in rows if row["context"] == int(context) and row["task"] == ALL and row["budget"]]
        exact = summary["accuracy"][context][ALL][EXACT]
        words = {
            "title": f"RULER's tasks, {int(context):,} tokens, by what a KV head keeps",
            "subtitle": f"{exact['items']} items, {Path(arguments.model).name}, {arguments.dtype}; 95% interval; "
            "the line: every token",
            "x_label": "tokens that a KV head keeps on average", "y_label": "score, percent",
        }  # fmt: skip
        name = "" if not charts else context
        charts.append(lines(name, points, "budget", "score", "method", scale=100, level=100 * exact["value"], **words))
    if profile_path(parts).exists():
        profile = load_budgets(str(profile_path(parts)))
        summary["heads"] = {
            "budget": profiled(arguments),
            "mean_share": [[value / sum(row) for value in row] for row in profile.budgets],
            **profile.model_dump(mode="json", include={"method", "lengths", "data_sets", "busy_rates"}),
        }
        charts.append(Chart("heads", lambda path: draw_profile(profile, str(path)), size=None))
    for title, table in score_tables(rows):
        print(f"\n{title}\n{align(table)}")
    show_summary(summary, "exact_items", "exact_equal", "best_method_at_budget")
    publish(arguments, "accuracy", machine, rows, summary, charts)
    return int(summary["exact_equal"] < summary["exact_items"])


def main() -> int:
    """Entry of the process started by hand, which starts the ranks of every part, and of every rank."""
    arguments = parse_arguments()
    if is_rank():
        return serve(arguments, measure_rank, shared_memory=False)
    from harness.publish import Parts, describe_machine

    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="megakv-benchmark-") as spare:
        try:
            read_items(Path(arguments.data), arguments.tasks, arguments.context)
            parts = Parts(Path(arguments.parts or spare), identity(arguments))
            status, _, _ = launch_all(arguments, launches(arguments, parts))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        quiet()
        # What is kept is shown whatever ended the run.
        return report(arguments, machine, parts) or status


if __name__ == "__main__":
    sys.exit(main())
