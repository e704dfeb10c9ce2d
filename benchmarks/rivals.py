"""MegaKV against transformers, DeepSpeed, vLLM and llama.cpp: one model, the same prompts, cores and number of threads.

Every rival runs in an environment of its own, which ``bash benchmarks/rivals.sh`` makes, and waits asleep for its turn.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from harness.charts import groups
from harness.document import model_folder, prompts
from harness.launch import Found, Rows, Summary, benchmark_alone
from harness.options import Options
from harness.publish import show, show_summary
from harness.rivals import CORES, RIVALS, Turn, Worker, row_of
from harness.statistics import ratio
from tqdm import tqdm

from megakv.base.errors import MegaKVError

DTYPES = ("fp32", "bf16")
MEASURES = {"ttft": ("seconds", 1, "s to the first token"), "ttit": ("ttit_s", 1e3, "ms for each further token")}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.add("--quick", False, "the shortest prompt, once")
    options.names("--rivals", RIVALS, ",".join(name for name in RIVALS if name != "deepspeed"), "which to run")
    options.names("--dtypes", DTYPES, ",".join(DTYPES), "types of weights and activations")
    options.numbers("--lengths", {"": "1K,4K,7900", "quick": "1K"}, "tokens of the prompts")
    options.add("--new-tokens", 32, "tokens after the first, whose median time is the TTIT")
    options.add("--repeats", {"": 3, "quick": 1}, "rounds of all rivals at each length")
    options.add("--slow", 2.0, "a rival that takes so many times as long as the fastest is not repeated", least=1)
    options.add("--model", "", "folder of the model, with its tokenizer; SmolLM2-135M-Instruct if none is named")
    options.output()
    arguments = options.parse(argv)
    if len(os.sched_getaffinity(0)) < CORES:
        options.error(f"this process may use one core; it needs {CORES}")
    return arguments


def run(arguments: argparse.Namespace) -> Found:
    model, arguments.positions = model_folder(arguments.model)
    arguments.model = str(model)
    if (most := arguments.positions - arguments.new_tokens - 1) < max(arguments.lengths):
        raise ValueError(
            f"--lengths {max(arguments.lengths)}: with --new-tokens {arguments.new_tokens} the {arguments.positions} "
            f"positions of the model leave {most}"
        )
    rows: Rows = []
    facts: Summary = {}
    not_run: dict[str, str] = {}
    for dtype in arguments.dtypes:
        rows += measure(arguments, model, dtype, facts, not_run)
    summary, charts = report(rows)
    return rows, {**summary, "not_run": not_run, "rivals": facts}, charts


def measure(arguments: argparse.Namespace, model: Path, dtype: str, facts: Summary, not_run: dict[str, str]) -> Rows:
    """The rows of one type: at every length, from the shortest on, rounds of all rivals that can be had."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    asked = [name for name in arguments.rivals if not RIVALS[name].weights or dtype == DTYPES[-1]]
    rows: Rows = []
    with ExitStack() as stack, tqdm(total=len(asked), unit="rival", dynamic_ncols=True) as bar:
        workers: dict[str, Worker] = {}

        def fails(name: str, error: MegaKVError) -> None:
            not_run[f"{name}, {dtype}"] = str(error)
            workers.pop(name, None)
            bar.write(f"{name}, {dtype}: not measured: {error}")

        for name in asked:
            bar.set_description(f"{dtype}: starting {name}")
            try:
                worker = stack.enter_context(Worker(name, model, dtype, cores=cores, positions=arguments.positions))
                # Before any clock runs: the first prompt is always slow.
                worker.turn(next(prompts(model, min(arguments.lengths)))[::-1], 2)
                workers[name], facts[name] = worker, worker.facts
            except MegaKVError as error:
                fails(name, error)
            bar.update()
        bar.reset(len(workers) * len(arguments.lengths) * arguments.repeats)
        for length in arguments.lengths:
            turns: dict[str, list[Turn]] = {name: [] for name in workers}
            for repeat, prompt in zip(range(arguments.repeats), prompts(model, length), strict=False):
                order = list(workers)
                for name in order[repeat % len(order) :] + order[: repeat % len(order)]:
                    if not is_slow(turns, name, arguments.slow):
                        bar.set_description(f"{dtype}, {length:,} tokens: {name}")
                        try:
                            turns[name].append(workers[name].turn(prompt, arguments.new_tokens))
                        except MegaKVError as error:
                            fails(name, error)
                    bar.update()
            rows += [row_of(name, dtype, length, turns[name], turns.get("transformers", ())) for name in workers]
    return rows


def is_slow(turns: Mapping[str, Sequence[Turn]], name: str, factor: float) -> bool:
    """Whether its first round is all that is wanted of a rival; MegaKV is always repeated."""
    first = {name: found[0].ttft_s for name, found in turns.items() if found}
    return name in first and not RIVALS[name].own and first[name] > factor * min(first.values())


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """MegaKV's times over those of the best rival with weights of the same type, and where any rival is faster."""
    summary: Summary = {f"{measure}_over_best_rival": {} for measure in MEASURES}
    loses = []
    for dtype, length in dict.fromkeys((row["dtype"], row["context"]) for row in rows):
        cell = [row for row in rows if (row["dtype"], row["context"]) == (dtype, length)]
        own, rivals = [[row for row in cell if RIVALS[row["rival"]].own == ours] for ours in (True, False)]
        own = [row for row in own if row["weights"] == dtype]
        for measure, (key, scale, unit) in MEASURES.items():
            same = [row for row in rivals if row["weights"] == dtype]
            if not own or not same:
                continue
            best, ours = (min(some, key=lambda row: median(row[key])) for some in (same, own))
            over = {row["rival"]: ratio(row[key], best[key], paired=False).to_json() for row in own}
            found = summary[f"{measure}_over_best_rival"].setdefault(dtype, {})
            found[str(length)] = {"rival": best["rival"], **over}
            for row in rivals:
                if (theirs := median(row[key])) < (mine := median(ours[key])):
                    loses.append(
                        f"{dtype}, {length:,} tokens: {scale * mine:.3g} {unit} with {ours['runs']}, "
                        f"{scale * theirs:.3g} with {row['runs']}: {mine / theirs:.2f} times as long"
                    )
    equal: dict[str, bool] = {}
    for row in rows:
        if row["dtype"] == "fp32" and "tokens_equal" in row:
            equal[row["rival"]] = equal.get(row["rival"], True) and row["tokens_equal"]
    summary |= {"tokens_equal_fp32": equal, "loses": loses}
    show(rows, "runs dtype weights context ranks threads seconds:s ttit_s:ms peak_bytes:MB tokens_equal equal_tokens")
    show_summary(summary)
    print("\nWhere MegaKV loses:\n" + ("\n".join(loses) or "nowhere"))
    words = {"subtitle": "prompts of so many tokens; medians, 95% intervals", "size": (12.0, 5.0)}
    charts = [
        groups(f"{measure}.{dtype}", [row for row in rows if row["dtype"] == dtype], "{context:,}", "runs", key,
               scale=scale, title=f"{measure.upper()} in {dtype}", y_label=unit, **words)
        for measure, (key, scale, unit) in MEASURES.items() for dtype in dict.fromkeys(row["dtype"] for row in rows)
    ]  # fmt: skip
    return summary, charts


if __name__ == "__main__":
    sys.exit(benchmark_alone("rivals", parse_arguments(), run))
