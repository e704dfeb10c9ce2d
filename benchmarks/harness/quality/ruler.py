"""Items of RULER's tasks, which scripts/ruler.sh writes: prompts, the score of an answer, and tables of scores."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..charts import Chart, lines
from ..statistics import Interval

TASKS = {
    "niah_single_1": 16, "niah_multikey_2": 16, "niah_multikey_3": 48, "noise_multikey": 16, "noise_multivalue": 64,
    "noise_multiquery": 64, "vt": 30, "cwe": 120, "fwe": 50,
}  # fmt: skip
"""Tokens of an answer: RULER's own, but for needles, where an answer begins with the values, and RULER allows 128."""
EXACT, UNBUDGETED = "exact", ("kv4", "int8", "q4_1", "fp8")
METHODS = ("streaming_llm", "pyramidkv", "snapkv", "h2o", "ada_snapkv", "headkv")
"""As FairKV's Table 3 has them, and those that it lacks."""
WAYS = (EXACT, *UNBUDGETED, *METHODS)
ALL = "all"  # Tasks, or tokens
Z = 1.96  # Of a 95% interval


@dataclass(frozen=True)
class Item:
    """A prompt, which ends where the answer is to begin, and the strings that are expected in it."""

    task: str
    context: int
    text: str
    expected: tuple[str, ...]

    @property
    def new_tokens(self) -> int:
        """The longest answer."""
        return TASKS[self.task]

    def score(self, answer: str) -> float:
        """RULER's string match: the share of the expected strings that are in an answer, whatever their case."""
        return sum(text.lower() in answer.lower() for text in self.expected) / len(self.expected)


def read_items(path: Path, tasks: Sequence[str], contexts: Sequence[int]) -> dict[tuple[int, str], list[Item]]:
    """By length and task, in the order of the file.

    Raises
    ------
    ValueError
        If the file is missing, or lacks one of them.
    """
    remedy = "write it with: bash scripts/ruler.sh"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        items = [Item(each["task"], each["context"], each["text"], tuple(each["expected"])) for each in entries]
    except OSError as error:
        raise ValueError(f"--data {path} cannot be read: {error.strerror}; {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--data {path} is no file of scripts/ruler.sh ({error!r}); {remedy}") from error
    found: dict[tuple[int, str], list[Item]] = {(context, task): [] for context in contexts for task in tasks}
    for item in items:
        if (item.context, item.task) in found:
            found[item.context, item.task].append(item)
    for (context, task), several in found.items():
        if not several:
            raise ValueError(f"--data {path} has no {task} of {context} tokens; {remedy} --context {context}")
    return found


def share(scores: Sequence[float]) -> Interval:
    """Mean score with Wilson's 95% interval for a share of so many items.

    An item of several strings may score between 0 and 1, which varies less than right and wrong do: there the interval
    is wider than it need be.
    """
    count, mean = len(scores), sum(scores) / len(scores)
    spread = Z * Z / count
    middle = (mean + spread / 2) / (1 + spread)
    reach = Z / (1 + spread) * math.sqrt(mean * (1 - mean) / count + spread / (4 * count))
    return Interval(mean, min(mean, max(0.0, middle - reach)), max(mean, min(1.0, middle + reach)))


def rows_of(answers: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> list[dict[str, Any]]:
    """A row for every length, way and task, and for all its tasks together, of answers by batch and way.

    A batch is called ``PART-CONTEXT-TASK-NUMBER``, a way ``METHOD-BUDGET`` or ``METHOD``.
    """
    found: dict[tuple[int, str, str], list[Mapping[str, Any]]] = {}
    for batch, ways in answers.items():
        _, context, task, _ = batch.split("-")
        for way, several in ways.items():
            for name in (task, ALL):
                found.setdefault((int(context), way, name), []).extend(several)
    rows = []
    for (context, way, task), several in sorted(found.items(), key=lambda entry: _order(*entry[0])):
        method, _, budget = way.partition("-")
        scores = [each["score"] for each in several]
        kept = sum(each["kept"] for each in several) / sum(each["tokens"] for each in several)
        rows.append(
            {"context": context, "method": method, "budget": int(budget) if budget else None, "task": task,
             "items": len(scores), "score": share(scores).to_json(), "kept": kept, "scores": scores}
        )  # fmt: skip
    return rows


def _order(context: int, way: str, task: str) -> tuple[Any, ...]:
    method, _, budget = way.partition("-")
    return context, int(budget or 0), WAYS.index(method), [*TASKS, ALL].index(task)


def by_length(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By length and budget, or ``all``, the score of each method over all tasks."""
    scores: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["task"] == ALL:
            budget = ALL if row["budget"] is None else str(row["budget"])
            cell = {**row["score"], "items": row["items"], "kept": row["kept"]}
            scores.setdefault(str(row["context"]), {}).setdefault(budget, {})[row["method"]] = cell
    return {"accuracy": scores}


def charts(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], words: str) -> list[Chart]:
    """Scores by budget, a picture for each length."""
    made: list[Chart] = []
    for context in summary["accuracy"]:
        points = [row for row in rows if row["context"] == int(context) and row["task"] == ALL and row["budget"]]
        exact = summary["accuracy"][context][ALL][EXACT]
        labels = {
            "title": f"RULER's tasks, {int(context):,} tokens, by what a KV head keeps",
            "subtitle": f"{exact['items']} items, {words}; 95% interval; the line: every token",
            "x_label": "tokens that a KV head keeps on average", "y_label": "score, percent",
        }  # fmt: skip
        form = {"scale": 100, "level": 100 * exact["value"]}
        made.append(lines(context if made else "", points, "budget", "score", "method", **form, **labels))
    return made


def compare_tokens(tokens: Mapping[str, Mapping[str, Sequence[Sequence[int]]]]) -> dict[str, Any]:
    """Count the items that got the same tokens from transformers and from MegaKV on one rank and on several.

    `tokens` has by ``PART-RANKS-CONTEXT-TASK-NUMBER``, and then by library, an item's tokens.
    """
    items: dict[str, dict[str, Any]] = {}
    for name, libraries in tokens.items():
        _, ranks, item = name.split("-", 2)
        for library, found in libraries.items():
            items.setdefault(item, {})[f"{library}, {ranks} rank(s)"] = found
    whole = {item: ways for item, ways in items.items() if len(ways) == max(map(len, items.values()), default=0)}
    equal = [item for item, ways in whole.items() if all(each == next(iter(ways.values())) for each in ways.values())]
    return {
        "exact_items": len(whole),
        "exact_equal": len(equal),
        "tokens_equal": len(equal) == len(whole),
        "exact_tokens": sum(len(next(iter(ways.values()))) for ways in whole.values()),
        "exact_ways": sorted({way for ways in whole.values() for way in ways}),
        "exact_different": sorted(set(whole) - set(equal)),
    }
