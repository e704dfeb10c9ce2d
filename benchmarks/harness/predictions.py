"""Predictions of a benchmark's own rows, from profiles that were measured in the same run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any

from megakv.base.partition import Partition
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile, load_profile
from megakv.costmodel.prefill import PrefillTimes, alone
from megakv.costmodel.shape import ModelShape
from megakv.injection.layer_kind import is_kind

from .links import FREE
from .models import DTYPES, model_config
from .plain import PlainTimes
from .profiles import profiles_of

Row = Mapping[str, Any]
TENSOR_PARALLEL = ("tp", "tp_gloo")
SINGLE = ("single", "single_masked", "single_idle", "in_place", "in_place_idle")
GENERATE_SHARES = 3
"""Before its first pass `generate` tells all ranks rank 0's random state, and waits for all: as long as three results.
"""
RATED = ("multiturn", "hosts", "runahead")
"""Benchmarks with a profile for every rate of their links."""
KNOWN = ("prefill", "decode", "scaling", *RATED)
ACROSS_HOSTS = {"cp": "pass_kv", "tp": "tp_gloo"}
"""Methods of `hosts.py`, as predictions call them."""
CANDIDATES = {"single": "one_rank", "runahead": "kvr_s", "pass_kv": "pass_kv", "pass_q": "pass_q"}
"""Names of candidates as `auto` has them, and the method of `runahead.py` that each is."""
CHOSEN = {method: candidate for candidate, method in CANDIDATES.items()} | {"runahead": "runahead"}

DIFFERING = 0.05  # Two measured times closer than this have no winner
SETTINGS = (
    "part", "processes", "shape", "link_gb_s", "ranks", "kv_heads", "rate", "noise", "context", "new_tokens",
    "cached_tokens", "batch", "kept",
)  # fmt: skip
"""Settings that a row may have, beside the method."""
MEASURES = (("", "seconds", ("cost_model_s", "predicted_s")), ("TTIT, ", "ttit_seconds", ("predicted_ttit_s",)))
"""Measured times: a name before the setting, and where a row has the samples and the prediction.

Before a scheduler's `predicted_s`, which steps have corrected, goes its `cost_model_s`."""


@dataclass(frozen=True)
class Predictions:
    """Predictions for one model on the ranks of one launch."""

    profile: HardwareProfile  # Of all ranks at once
    model: ModelShape
    size: int  # Ranks
    lone: HardwareProfile | None = None  # Of one rank while the others stand idle
    tp_size: int = 1  # Tensor-parallel degree of MegaKV's own methods
    by_blocks: bool = False  # Whether these compute a prompt's layers by blocks of rows

    def prefill(
        self, method: str, new: int, cached: int = 0, *, partition: Partition | None = None, generating: bool = False
    ) -> float | None:
        """Seconds of reading a prompt, in a process without memory to use again; None for what was not measured."""
        if method in TENSOR_PARALLEL or method in SINGLE:
            if (plain := self._plain(method)) is None:
                return None
            tp_size = 1 if method in SINGLE else self.size
            seconds = plain.prefill(new, masked=method == "single_masked", generating=generating)
            return seconds + TokenTimes(self.profile, self.model, tp_size=tp_size).first_s(new)
        profile = self.profile.without_links() if method == "kvr_silent" else self.profile
        work = Workload((new,), (cached,), self.size // self.tp_size)
        model = replace(self.model, fused=self.by_blocks)
        times = PrefillTimes(profile, model, work, tp_size=self.tp_size)
        tokens = TokenTimes(profile, model, tp_size=self.tp_size)
        begun = tokens.first_s(-(-new // work.size)) + (self._begun() if generating else 0.0)
        if method == "one_rank":
            partition = alone(work)[0]
        return begun + (times.seconds(method) if partition is None else times.seconds("runahead", (partition,)))

    def decode(self, method: str, context: int, batch: int = 1) -> float | None:
        """Seconds of a decoding step; None for what was not measured."""
        if method in TENSOR_PARALLEL or method in SINGLE:
            plain = self._plain(method)
            copied = not method.startswith("in_place")
            return None if plain is None else plain.decode(context, batch, copied=copied)
        work = Workload((1,) * batch, (context,) * batch, self.size // self.tp_size)
        return ttit_seconds(self.profile, self.model, work, method, tp_size=self.tp_size)

    def _begun(self) -> float:
        """Seconds of MegaKV's `generate` before its first pass."""
        shared = GENERATE_SHARES * self.profile.share_s if self.size > 1 else 0.0
        return shared + self.profile.begin_s + self.profile.added.begin_s

    def _plain(self, method: str) -> PlainTimes | None:
        if method not in TENSOR_PARALLEL:
            profile = self.lone if method.endswith("_idle") else self.profile
            return None if profile is None else PlainTimes(profile, self.model)
        shared = method == "tp" and self.profile.sum_times(self.size, shared_memory=True) is not None
        return PlainTimes(self.profile, self.model, tp_size=self.size, shared_memory=shared)

    def of(self, benchmark: str, row: Row, arguments: argparse.Namespace) -> dict[str, float | None]:
        """A row's predicted seconds, under the names that they have in it."""
        method, context = row["method"], row["context"]
        match benchmark:
            case "decode":
                # What `auto` is was chosen in the run.
                unknown = method in ("alone", "auto")
                return {"predicted_s": None if unknown else self.decode(method, context, row["batch"])}
            case "multiturn":
                return {"predicted_s": self.prefill(method, row["new_tokens"], row["cached_tokens"])}
            case "hosts":
                return {"predicted_s": self.prefill(ACROSS_HOSTS[method], context)}
            case "scaling":
                own = method == "cp"
                # The steps that are measured follow the first token; their mean is that of the middle one.
                ttit = self.decode("replicated" if own else method, context + arguments.tokens // 2)
                ttft = self.prefill("pass_kv" if own else method, context, generating=True)
                return {"predicted_s": ttft, "predicted_ttit_s": ttit}
            case "runahead" if row["noise"] != "quiet":
                # No formula knows a competing flow.
                return {"predicted_s": None}
            case "runahead" if method == "auto":
                return {"predicted_s": row["candidates_s"].get(CHOSEN.get(row["auto"]))}
        partition = tuple(row["partition"]) if row.get("partition") else None
        return {"predicted_s": self.prefill(method, context, partition=partition)}


def with_predictions(
    benchmark: str, arguments: argparse.Namespace, rows: Sequence[Row], find: Callable[[str], Path | None]
) -> list[dict[str, Any]]:
    """Rows with ``predicted_s``, those of `scaling.py` with ``predicted_ttit_s`` too; None without a profile."""
    names = ("predicted_s", "predicted_ttit_s") if benchmark == "scaling" else ("predicted_s",)

    @cache
    def known(ranks: int, rate: str | None, kv_heads: int) -> Predictions | None:
        name = f"r{ranks}-kv{kv_heads}-{rate}" if benchmark == "runahead" else f"{ranks}-{rate}" if rate else f"{ranks}"
        path, alone = find(name), find(f"1-of-{ranks}")
        lone = load_profile(alone) if alone is not None and alone.exists() else None
        if path is None:
            return None
        profile = lone if ranks == 1 and lone is not None else load_profile(path)
        config = model_config(argparse.Namespace(**{**vars(arguments), "kv_heads": kv_heads}))
        model = ModelShape.from_config(config, dtype=DTYPES[arguments.dtype])
        by_blocks = profile.fingerprint.accelerator == "cpu" and is_kind(config.model_type)
        tp_size = ranks // arguments.hosts if benchmark == "hosts" else 1
        return Predictions(profile, model, ranks, lone, tp_size, by_blocks)

    found = []
    for row in rows:
        rate = row.get("rate")
        if benchmark not in RATED and rate == FREE:
            rate = None
        predictions = known(row["ranks"], rate, row.get("kv_heads", arguments.kv_heads))
        predicted = dict.fromkeys(names) if predictions is None else predictions.of(benchmark, row, arguments)
        found.append({**row, **predicted})
    return found


def predicted_in_run(benchmark: str, arguments: argparse.Namespace, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of a run that kept its profiles beside its results, if it had the time to measure them."""
    if benchmark not in KNOWN:
        return [dict(row) for row in rows]
    kept = arguments.json and arguments.profile_seconds
    folder = profiles_of(Path(arguments.json)) if kept else None
    return with_predictions(benchmark, arguments, rows, lambda name: folder and folder / f"{name}.json")


def predicted_anew(results: Mapping[str, Any], path: Path) -> list[dict[str, Any]] | None:
    """The rows of a results file as they are predicted now; None where it kept no profiles, or none for its rows."""
    folder, benchmark = profiles_of(path), results["benchmark"]
    if not folder.is_dir() or benchmark not in KNOWN:
        return None

    def find(name: str) -> Path | None:
        profile = folder / f"{name}.json"
        return None if benchmark == "runahead" and not profile.exists() else profile

    return with_predictions(benchmark, argparse.Namespace(**results["args"]), results["rows"], find)


@dataclass(frozen=True)
class Time:
    """One method's time in one setting, in seconds."""

    setting: str
    method: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def times_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[Time]:
    for row in rows:
        setting = ", ".join(f"{name} {row[name]}" for name in SETTINGS if name in row)
        for kind, samples, names in MEASURES:
            if known := [row[name] for name in names if isinstance(row.get(name), float)]:
                yield Time(kind + setting, row["method"], known[0], median(row[samples]))


def unpredicted(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Methods that some row was measured by without a prediction; a kernel's own times are none's."""
    missing = {
        row["method"]
        for row, (_, key, names) in product(rows, MEASURES)
        if "method" in row and key in row and all(row.get(name) is None for name in names)
    }
    return sorted(missing)


def winners(times: Sequence[Time]) -> list[bool]:
    """Tell of every two methods of one setting that differ whether the faster one was predicted to be."""
    return [
        (one.predicted < other.predicted) == (one.measured < other.measured)
        for one, other in combinations(times, 2)
        if one.setting == other.setting
        and abs(one.measured - other.measured) / min(one.measured, other.measured) > DIFFERING
    ]
