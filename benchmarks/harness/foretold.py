"""What the cost model says of the rows of a benchmark: in its own run, and anew from the profiles that it kept.

The profiles of FILE.json are in FILE.profiles, see `harness.profiles.keep_profile`. Predicting anew shows what a change
of the cost model does to what was measured before, without measuring it again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megakv.costmodel.hardware import load_profile
from megakv.costmodel.shape import ModelShape

from .models import DTYPES, llama_config
from .predictions import Predictions
from .profiles import LONE, profiles_of
from .runahead_predictions import with_predictions

Row = Mapping[str, Any]
Times = dict[str, float | None]
RATED = ("multiturn", "hosts")
"""Benchmarks with a profile for every rate of their links."""
KNOWN = ("prefill", "decode", "scaling", *RATED)
ACROSS_HOSTS = {"cp": "pass_kv", "tp": "tp_gloo"}
"""Methods of `hosts.py`, as predictions call them."""


def foretold(benchmark: str, row: Row, predictions: Predictions | None, arguments: argparse.Namespace) -> Times:
    """A row's predicted seconds, under the names that they have in it; None each without predictions."""
    names = ("predicted_s", "predicted_ttit_s") if benchmark == "scaling" else ("predicted_s",)
    if predictions is None:
        return dict.fromkeys(names)
    method, context = row["method"], row["context"]
    if benchmark == "decode":
        return {"predicted_s": predictions.decode(method, context, row["batch"])}
    if benchmark == "multiturn":
        return {"predicted_s": predictions.prefill(method, row["new_tokens"], row["cached_tokens"])}
    if benchmark == "hosts":
        return {"predicted_s": predictions.prefill(ACROSS_HOSTS[method], context)}
    if benchmark == "scaling":
        return _generated(predictions, method, context, arguments.tokens)
    return {"predicted_s": predictions.prefill(method, context)}


def _generated(predictions: Predictions, method: str, context: int, tokens: int) -> Times:
    """Of a row of `scaling.py`, whose methods generate."""
    own = method == "cp"
    # The steps that are measured follow the first token; their mean is that of the middle one.
    middle = context + tokens // 2
    return {
        "predicted_s": predictions.prefill("pass_kv" if own else method, context, generating=True),
        "predicted_ttit_s": predictions.decode("replicated" if own else method, middle),
    }


def foretold_anew(results: Mapping[str, Any], path: Path) -> list[Row] | None:
    """The rows of a results file as they are predicted now; None where it kept no profiles, or none for its rows."""
    folder, benchmark, rows = profiles_of(path), results["benchmark"], results["rows"]
    if not folder.is_dir():
        return None
    arguments = argparse.Namespace(**results["args"])
    if benchmark == "runahead":
        return list(with_predictions(rows, arguments, lambda group: folder / f"{group.name}.json"))
    if benchmark not in KNOWN:
        return None
    # Sizes are all that is asked of it: how far its positions reach is none of them.
    model = ModelShape.from_config(llama_config(arguments, positions=1), dtype=DTYPES[arguments.dtype])

    @cache
    def predictions(ranks: int, rate: str | None) -> Predictions:
        alone = folder / f"{LONE}{ranks}.json"
        lone = load_profile(alone) if alone.exists() else None
        name = f"{ranks}" if rate is None else f"{ranks}-{rate}"
        profile = lone if ranks == 1 and lone is not None else load_profile(folder / f"{name}.json")
        tp_size = ranks // arguments.hosts if benchmark == "hosts" else 1
        return Predictions(profile, model, ranks, lone, tp_size)

    found = []
    for row in rows:
        known = predictions(row["ranks"], row["rate"] if benchmark in RATED else None)
        found.append({**row, **foretold(benchmark, row, known, arguments)})
    return found
