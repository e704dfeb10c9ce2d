"""Decoding with keys and values, and perhaps weights, behind one host link, as a program of the simulator (KVPR)."""

from __future__ import annotations

from dataclasses import dataclass

from megakv.costmodel.offload_pipeline import StepTimes
from megakv.costmodel.simulation_program import Program

BUFFERS = 2
"""Layers whose keys and values are on the accelerator at a time: the one at work, and the next."""


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of one layer on the host link: of keys, values and activations, and of weights."""

    cache: int = 0
    weights: int = 0


def offload_program(
    times: StepTimes,
    layers: int,
    *,
    steps: int,
    ranks: int = 1,
    weights_s: float = 0.0,
    sent: LinkBytes | None = None,
) -> Program:
    """Steps of decoding, each rank for itself; `times` and `sent` are one layer's, `weights_s` those of its weights.

    A layer's transfers begin when one of two buffers is free. Its recomputation waits for the activations, its
    attention for everything. Weights, where they are offloaded too, come behind the layer's keys and values on the same
    link, and what follows attention waits for them.
    """
    program = Program(ranks)
    for rank in range(ranks):
        _add_rank(program, rank, times, layers, steps, weights_s, sent or LinkBytes())
    return program


def _add_rank(
    program: Program, rank: int, times: StepTimes, layers: int, steps: int, weights_s: float, sent: LinkBytes
) -> None:
    first_bytes, landed_bytes = (
        round(sent.cache * seconds / times.sent_s) if times.sent_s else 0 for seconds in (times.first_s, times.landed_s)
    )
    attended: list[int] = []
    busy: list[int] = []
    carried: list[int] = []
    for _ in range(steps):
        for layer in range(layers):
            free = attended[-BUFFERS:][: len(attended) >= BUFFERS]
            first = program.load("activations", rank, times.first_s, [*carried, *free], first_bytes, layer=layer)
            others, nbytes = times.landed_s - times.first_s, landed_bytes - first_bytes
            landed = program.load("activations", rank, others, [first], nbytes, layer=layer)
            rest = times.sent_s - times.landed_s
            there = program.load("kv", rank, rest, [landed], sent.cache - landed_bytes, layer=layer)
            carried = [there]
            if weights_s:
                carried = [program.load("weights", rank, weights_s, carried, sent.weights, layer=layer)]
            # All but the last activations are recomputed as they land.
            early = program.compute("recompute", rank, times.recompute_s - times.last_s, [*busy, first], layer=layer)
            queries = program.compute("recompute", rank, times.last_s, [early, landed], layer=layer)
            parts = [program.compute("attention", rank, times.attend_s, [queries, there], layer=layer)]
            if times.host_s:
                parts.append(program.attend_on_host(rank, times.host_s, [queries], layer=layer))
            attended.append(program.compute("attention", rank, 0.0, parts, layer=layer))
            needed = [attended[-1], *(carried if weights_s else [])]
            busy = [program.compute("dense", rank, times.layer_s, needed, layer=layer)]
        busy = [program.compute("dense", rank, times.outside_s, busy)]
