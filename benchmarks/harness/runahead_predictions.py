"""What the cost model says of every method that `runahead.py` measured, from the profiles of its ranks and links."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megakv.costmodel.hardware import load_profile
from megakv.costmodel.shape import ModelShape

from .models import CONFIGS, DTYPES
from .noise import QUIET
from .predictions import Predictions
from .runahead_plan import Group
from .runahead_summary import PREDICTED

CHOSEN = {method: candidate for candidate, method in PREDICTED.items()} | {"runahead": "runahead"}
"""What `auto` chose, and what it calls it."""


def with_predictions(
    rows: Sequence[Mapping[str, Any]], arguments: argparse.Namespace, profile_of: Callable[[Group], Path]
) -> list[dict[str, Any]]:
    """Rows with ``predicted_s``: None without a profile, and beside a competing flow, which no formula knows."""
    known: dict[Group, Predictions | None] = {}
    found = []
    for row in rows:
        group = Group(row["ranks"], row["kv_heads"], row["rate"], ())
        if group not in known:
            known[group] = _predictions(group, arguments, profile_of(group))
        predictions = known[group] if row["noise"] == QUIET else None
        found.append({**row, "predicted_s": None if predictions is None else _predicted(predictions, row)})
    return found


def _predictions(group: Group, arguments: argparse.Namespace, path: Path) -> Predictions | None:
    if not path.exists():
        return None
    sizes = argparse.Namespace(**{**vars(arguments), "kv_heads": group.kv_heads})
    config = CONFIGS[arguments.family](sizes, positions=max(arguments.context))
    model = ModelShape.from_config(config, dtype=DTYPES[arguments.dtype])
    return Predictions(load_profile(path), model, group.ranks)


def _predicted(predictions: Predictions, row: Mapping[str, Any]) -> float | None:
    if row["method"] == "auto":
        seconds: float | None = row["candidates_s"].get(CHOSEN[row["auto"]])
        return seconds
    partition = None if row["partition"] is None else tuple(row["partition"])
    return predictions.prefill(row["method"], row["context"], partition=partition)
