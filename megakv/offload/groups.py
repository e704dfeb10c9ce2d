"""Row by row or column by column (KVPR, Section 3): groups of a batch, and where weights lie, by predicted seconds."""

from __future__ import annotations

from typing import Literal, NamedTuple

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.decoding import decode_methods
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.memory import rank_memory
from megakv.costmodel.shape import ModelShape
from megakv.offload.times import offloaded_step

Objective = Literal["latency", "throughput"]


def group_counts(batch: int) -> list[int]:
    """Numbers of groups that a batch may go through layers in: powers of two, and a group for each sequence."""
    return sorted({batch, *(1 << level for level in range(batch.bit_length()))})


class BatchRate(NamedTuple):
    """A batch that has room, and what its decoding is predicted to give."""

    batch: int
    groups: int
    tokens_per_s: float


def best_rate(
    profile: HardwareProfile,
    link: Curve,
    model: ModelShape,
    *,
    tokens: int,
    room: int,
    host: int,
    weights: bool,
    plan: str = "auto",
    cp_size: int = 1,
    tp_size: int = 1,
    sharers: int = 1,
) -> BatchRate | None:
    """Of all batches that have room, the one that decodes most tokens per second; None where not one sequence has.

    tokens: of each sequence.
    room, host: bytes of a rank's accelerator, and of its host memory.
    weights: whether those of layers lie in host memory, too.
    """
    found: list[BatchRate] = []
    batch = 1
    while True:
        given = {"context": tokens, "batch": batch, "cp_size": cp_size, "tp_size": tp_size}
        # Of one batch, more groups than have room for it make a step no shorter.
        for groups in group_counts(batch):
            memory = rank_memory(model, **given, offloaded=True, weights_away=weights, groups=groups)
            if memory.total <= room and memory.host <= host:
                break
        else:
            return max(found, key=lambda each: each.tokens_per_s, default=None)
        step = Workload((1,) * batch, (tokens,) * batch, cp_size)
        seconds = min(
            offloaded_step(
                profile, link, model, step, method,
                tp_size=tp_size, plan=plan, weights=weights, groups=groups, sharers=sharers,
            ).seconds
            for method in decode_methods(cp_size, weights_here=not weights)
        )  # fmt: skip
        found.append(BatchRate(batch, groups, batch / seconds))
        batch *= 2
