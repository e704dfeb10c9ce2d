"""Predicted against measured on the machine at hand, for every benchmark whose results are in a folder.

Reads the results that other benchmarks wrote and measures nothing. Which of them carry no predictions, and why, is in
the answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.charts import predicted_over
from harness.options import Options
from harness.predictions import Time, predicted_anew, times_of, unpredicted, winners
from harness.publish import describe_machine, publish, show, show_summary, write_json

WITHOUT = {
    "accuracy": "it measures answers, not times",
    "attention_gpu": "it measures the kernel that profiles are made of",
    "fairkv_virtual_ranks": "no step of its ranks was measured, only their kernels",
    "host_attention": "it measures the kernel that the offload engine's profiles are made of",
    "limits": "it measures the kernels that profiles are made of",
}


def summarise(found: Mapping[str, Sequence[Time]], without: Mapping[str, str]) -> dict[str, Any]:
    """Errors and winners by benchmark and altogether, and where there is no prediction."""
    benchmarks = {}
    for name, times in found.items():
        right, errors = winners(times), [time.error for time in times]
        benchmarks[name] = {
            "times": len(times),
            "median_error": median(map(abs, errors)),
            "median_signed_error": median(errors),
            "largest_error": max(map(abs, errors)),
            "pairs": len(right),
            "right_winners": sum(right),
        }
    errors = [abs(time.error) for time in itertools.chain(*found.values())]
    right, pairs = (sum(entry[name] for entry in benchmarks.values()) for name in ("right_winners", "pairs"))
    return {
        "median_error": median(errors) if errors else None,
        "right_winner_share": right / pairs if pairs else None,
        "pairs": pairs,
        "benchmarks": benchmarks,
        "without_predictions": dict(without),
    }


def results_in(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Files of results with predictions of their own rows, and what they hold."""
    if not folder.is_dir():
        raise ValueError(f"--results {folder}: no such folder")
    for path in sorted(folder.glob("*.json")):
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            benchmark, _ = results["benchmark"], results["rows"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a benchmark's results ({error!r})") from error
        if benchmark not in ("validate_papers", "predictions"):
            yield path, results


def predict_anew(folder: Path) -> Iterator[str]:
    """Predict what kept its profiles by the cost model as it is now; the names of the files that were rewritten."""
    for path, results in results_in(folder):
        if (rows := predicted_anew(results, path)) is not None:
            write_json(path, {**results, "rows": rows})
            yield path.stem


def read(folder: Path) -> tuple[dict[str, list[Time]], dict[str, str]]:
    """Times by results file, and why a file has none."""
    found: dict[str, list[Time]] = {}
    without: dict[str, str] = {}
    for path, results in results_in(folder):
        if not (times := list(times_of(results["rows"]))):
            without[path.stem] = WITHOUT.get(results["benchmark"], "run without --profile-seconds")
            continue
        found[path.stem] = times
        if missing := unpredicted(results["rows"]):
            without[path.stem] = f"{', '.join(missing)} in some settings"
    return found, without


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.add("--results", str(Path(__file__).with_name("results")), "folder")
    text = "first predict anew, by the cost model as it is now, what has its profiles beside it, and rewrite that"
    options.add("--anew", False, text)
    options.output()
    return options.parse(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    folder = Path(arguments.results)
    try:
        if arguments.anew:
            print(f"predicted anew: {', '.join(predict_anew(folder)) or 'nothing kept its profiles'}")
        found, without = read(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    summary = summarise(found, without)
    columns = "benchmark times median_error:% median_signed_error:% largest_error:% right_winners pairs"
    show([{"benchmark": name, **entry} for name, entry in summary["benchmarks"].items()], columns)
    show_summary(summary, "median_error", "right_winner_share", "without_predictions")
    rows = [{"benchmark": name, **vars(time), "error": time.error} for name, own in found.items() for time in own]
    chart = predicted_over(rows, "measured", "benchmark", title="Cost model against this machine, seconds")
    publish(arguments, "predictions", describe_machine(), rows, summary, [chart])
    return 0


if __name__ == "__main__":
    sys.exit(main())
