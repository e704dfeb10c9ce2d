"""Where the time of attention goes, per operation (context parallelism, Tables 5 and 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import megakv
from megakv.tracking.measurements import Event

COLLECTIVES = ("all_gather", "replicated", "pass_q_return")
PARTS = ("attention", "send_recv", "send_recv_exposed", "collective", "layer")


def attention_us(engine: megakv.MegaKVEngine) -> dict[str, float]:
    """Microseconds, means over layers and ranks, since its counts began. Every rank must ask."""
    return _mean(attention_times(rank.events) for rank in engine.report().ranks)


def generated_us(engine: megakv.MegaKVEngine) -> dict[str, dict[str, float]]:
    """The same of the last `generate`: ``prefill_us`` and ``decode_us``."""
    first, later = zip(*(split_phases(rank.events) for rank in engine.report().ranks), strict=True)
    return {"prefill_us": _mean(map(attention_times, first)), "decode_us": _mean(map(attention_times, later))}


def attention_times(events: Sequence[Event]) -> dict[str, float]:
    """Mean microseconds of one rank."""
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    for event in events:
        kind = {"communication": "send_recv", "wait": "send_recv_exposed"}.get(event.kind)
        if event.name in COLLECTIVES:
            # It is waited for as long as it takes.
            kind = "collective" if event.kind == "communication" else None
        kind = "attention" if event.name == "attention" else kind
        if event.layer is not None and kind is not None:
            times[kind].append(event.end - event.start)
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


def _mean(ranks: Iterable[dict[str, float]]) -> dict[str, float]:
    values = list(ranks)
    return {name: sum(value[name] for value in values) / len(values) for name in values[0]}
