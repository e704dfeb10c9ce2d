"""The paper's Tables 1 and 2 of a budget profile, printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megakv.fairkv.profile import BudgetProfile


def print_tables(profile: BudgetProfile) -> None:
    """Similarity between data sets, and busy rates of ranks that hold neighbouring heads."""
    sets = profile.data_sets or ()
    mean = statistics.fmean(value for row in profile.budgets for value in row)
    name = profile.model.rstrip("/\\").rpartition("/")[2]
    print(f"\n{name}, {profile.method}: {mean:.0f} tokens kept by a KV head on average")
    print("\nTable 1: cosine similarity of a data set's budgets with the mean of the others'")
    lines = [["data set", "prompts", "similarity"]]
    lines += [[each.name, str(each.prompts), _shown(each.similarity)] for each in sets]
    known = [each.similarity for each in sets if each.similarity is not None]
    _print(lines)
    if known:
        print(
            f"mean {statistics.fmean(known):.3f}, largest {max(known):.3f}, smallest {min(known):.3f}, "
            f"standard deviation {statistics.pstdev(known):.3f}"
        )
    else:
        print("one data set only: nothing to compare it with")
    print("\nTable 2: busy rate of ranks with neighbouring heads, in percent of the attention time")
    sizes = sorted(profile.busy_rates or {})
    lines = [["data set", *(f"TP = {size}" for size in sizes)]]
    for each in sets:
        lines.append([each.name, *(f"{100 * each.busy_rates[size]:.1f}" for size in sizes)])
    lines.append(["all", *(f"{100 * (profile.busy_rates or {})[size]:.1f}" for size in sizes)])
    _print(lines)
    if not sizes:
        print("the model has one KV head: no ranks to divide heads among")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
