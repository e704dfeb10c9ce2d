"""Where the time of attention goes, per operation (context parallelism, Tables 5 and 8)."""

from __future__ import annotations

from collections.abc import Sequence

import megakv
from megakv.tracking import Event

COLLECTIVES = ("all_gather", "replicated", "pass_q_return")
PARTS = ("attention", "send_recv", "send_recv_exposed", "collective", "layer")


class Breakdown:
    """Attention times of an engine between two moments. Every rank must make it and ask it."""

    def __init__(self, engine: megakv.MegaKVEngine):
        self._engine = engine
        self._seen = [len(rank.events) for rank in engine.report().ranks]

    def microseconds(self) -> dict[str, float]:
        """Means over layers and ranks of what happened since; see `attention_times`."""
        ranks = self._engine.report().ranks
        return _mean([attention_times(rank.events[seen:]) for rank, seen in zip(ranks, self._seen, strict=True)])

    def generated(self) -> dict[str, dict[str, float]]:
        """The same of the last `generate`: ``prefill_us`` and ``decode_us``."""
        phases = [split_phases(rank.events) for rank in self._engine.report().ranks]
        prefill, decode = (_mean([attention_times(pair[index]) for pair in phases]) for index in range(2))
        return {"prefill_us": prefill, "decode_us": decode}


def attention_times(events: Sequence[Event]) -> dict[str, float]:
    """Mean microseconds of one rank."""
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    for event in events:
        if event.layer is None:
            continue
        if event.name == "attention":
            times["attention"].append(event.end - event.start)
        elif event.name in COLLECTIVES:
            # It is waited for as long as it takes.
            times["collective"] += [event.end - event.start] if event.kind == "communication" else []
        elif event.kind == "communication":
            times["send_recv"].append(event.end - event.start)
        elif event.kind == "wait":
            times["send_recv_exposed"].append(event.end - event.start)
    # A ring has a hop less than steps; other methods have one step.
    passes = len(times["attention"]) - len(times["send_recv"])
    total = sum(sum(times[name]) for name in ("attention", "send_recv_exposed", "collective"))
    means = {name: 1e6 * sum(values) / max(len(values), 1) for name, values in times.items()}
    return {**means, "layer": 1e6 * total / max(passes, 1)}


def split_phases(events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """The events of a `generate` call: its first pass, and the later ones. Each pass ends by sharing its logits."""
    shared = [event.end for event in events if event.name == "logits" and event.kind == "communication"]
    attention = [event for event in events if event.name == "attention"]
    # A rank that is alone shares nothing: one attention per layer and pass.
    alone = attention[len({event.layer for event in attention}) :]
    end = shared[0] if shared else alone[0].start if alone else float("inf")
    return [event for event in events if event.start < end], [event for event in events if event.start >= end]


def _mean(values: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(value[name] for value in values) / len(values) for name in values[0]}
