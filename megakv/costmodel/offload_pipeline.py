"""Seconds of a step of offloaded layers, row by row or column by column (KVPR, Figures 3 and 4), weights included.

Column by column, the sequences of a batch are attended to in groups, one behind the other within each layer; a layer's
weights are sent once for all of them. Row by row is the case of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megakv.costmodel.offload import LayerCosts, StepTimes


@dataclass(frozen=True)
class WeightTimes:
    """What sending a layer's weights takes.

    Parameters
    ----------
    keys_s : float
        Those that keys and values are computed with, W_K and W_V, which come first (Figure 5b).
    others_s : float
        All others: one piece for each group.
    """

    keys_s: float = 0.0
    others_s: float = 0.0


RESIDENT = WeightTimes()
"""Weights that stay on the accelerator."""


def group_times(
    costs: LayerCosts, recomputed: int, on_host: int, streamed: int, *, chunk: int, outside_s: float
) -> StepTimes:
    """What a group's tokens of a layer take.

    Parameters
    ----------
    costs : LayerCosts
        Of one group.
    recomputed, on_host, streamed : int
        Tokens of the group by what becomes of them.
    chunk : int
        Tokens of a chunk of activations.
    outside_s : float
        The accelerator's work outside the layers.
    """
    chunks = -(-recomputed // chunk)
    landed = costs.activation_s * recomputed + chunks * costs.transfer_s
    recompute = costs.recompute_s * recomputed + chunks * costs.launch_s
    return StepTimes(
        sent_s=landed + costs.kv_s * streamed + (costs.transfer_s if streamed else 0.0),
        landed_s=landed,
        recompute_s=recompute,
        last_s=recompute / chunks if chunks else 0.0,
        layer_s=costs.device_s,
        host_s=costs.host_fixed_s + costs.host_attend_s * on_host if on_host else 0.0,
        outside_s=outside_s,
    )


def step_seconds(
    groups: Sequence[StepTimes], layers: int, weights: WeightTimes = RESIDENT, *, rounds: int = 4
) -> float:
    """Seconds from step to step once the pipeline is full.

    A group's transfers begin when one of two buffers is free: when the group before the last has attended. Its
    recomputation ends with the last activations at the earliest, its attention when everything is there. A layer's
    weights, but for W_K and W_V, come into the place of those of the layer before the last, once that has ended.

    Parameters
    ----------
    groups : sequence of StepTimes
        A layer's, one for each group of sequences; `layer_s` is the group's part of the layer's other work, and
        `outside_s` that of the first counts.
    layers : int
    weights : WeightTimes
    rounds : int
        Steps that are played through; the last one counts.
    """
    count = len(groups)
    link = device = before = 0.0
    released, ended = [0.0, 0.0], [0.0, 0.0]
    pieces: list[float] = []
    # Pieces run ahead of the groups that they are sent with by as many groups as are in the buffers' way.
    ahead = max(0, count - 2)
    for _ in range(rounds):
        before = device
        for _ in range(layers):
            for index, times in enumerate(groups):
                begun = max(link, released[-2]) + (weights.keys_s if index == 0 else 0.0)
                landed, sent = begun + times.landed_s, begun + times.sent_s
                link = sent
                while len(pieces) <= count * (len(ended) - 2) + index + ahead:
                    link = max(link, ended[max(0, len(pieces) // count)]) + weights.others_s / count
                    pieces.append(link)
                if index == 0:
                    # The queries' weights come in the first piece.
                    device = max(device, pieces[count * (len(ended) - 2)])
                queries = max(device + times.recompute_s, landed + times.last_s)
                device = max(queries + times.host_s, sent)
                released = [released[-1], device]
                device += times.layer_s
            device = max(device, pieces[count * (len(ended) - 1) - 1])
            ended.append(device)
        device += groups[0].outside_s
    return device - before
