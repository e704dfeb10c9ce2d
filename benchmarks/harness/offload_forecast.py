"""What the offload engine's cost model says of a step before any step has shown anything."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megakv.costmodel.offload import GroupCosts, LayerCosts, sending_seconds
from megakv.costmodel.offload_pipeline import layer_times, step_seconds
from megakv.offload.methods import METHODS
from megakv.offload.profile import OffloadProfile

from .offload_plan import IN_MEMORY, Case, variant

PLANS = ("stream", "kvpr", "chunked", "cpu_rank")


def forecast(
    method: str,
    profile: OffloadProfile,
    *,
    layers: int,
    tokens: int,
    sequences: int,
    chunk: int,
    in_memory_s: float,
) -> float:
    """Seconds of a step, with weights and new tokens on the accelerator and one group of sequences."""
    costs = LayerCosts(
        kv_s=sending_seconds(profile.row_bytes, profile.link_bytes_s),
        activation_s=sending_seconds(profile.input_bytes, profile.link_bytes_s),
        recompute_s=profile.recompute_s,
        transfer_s=profile.transfer_s,
        launch_s=profile.launch_s,
        device_s=in_memory_s / layers,
        host_attend_s=profile.host_attend_s,
        host_fixed_s=profile.host_call_s + profile.host_fixed_s * sequences,
    )
    # Without activations there is nothing to recompute from, and without its speed the host attends to nothing.
    known = {"stream": True, "cpu_rank": profile.host_attend_s > 0}
    plans = [plan for plan in PLANS if known.get(plan, profile.input_bytes > 0)] if method == "auto" else [method]

    def seconds(plan: str) -> float:
        group = GroupCosts(costs, tokens, tokens, tokens, chunk=chunk)
        found = METHODS[plan].split(group)
        assert found is not None
        return step_seconds([layer_times(group, found)], layers)

    return min(map(seconds, plans))


def add_forecasts(
    rows: Sequence[dict[str, Any]],
    case: Case,
    profiles: Mapping[str, OffloadProfile | None],
    *,
    layers: int,
    chunk: int,
) -> None:
    """Set `forecast_s` in the rows of a case in which the work beside the link is known: a step in memory."""
    alone = next((statistics.median(row["seconds"]) for row in rows if row["method"] == IN_MEMORY), None)
    # What lies outside a window is not read, and the forecast is of a model without one.
    if alone is None or case.weights or case.in_memory is not None or case.groups > 1 or case.part == "windows":
        return
    for row in rows:
        profile = profiles.get(row["method"])
        if profile is not None and not row["lossy"]:
            row["forecast_s"] = forecast(
                variant(row["method"]).method,
                profile,
                layers=layers,
                tokens=round(statistics.median(cached for cached, _ in row["split_points"])),
                sequences=case.batch,
                chunk=chunk,
                in_memory_s=alone,
            )
