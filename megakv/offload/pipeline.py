"""Seconds of a step of offloaded layers, row by row or column by column (KVPR, Figures 3 and 4), weights included.

Column by column, the sequences of a batch are attended to in groups, one behind the other within each layer; a layer's
weights are sent once for all of them. Row by row is the case of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megakv.offload.method import Split
from megakv.offload.prices import RESIDENT, GroupPrices, WeightTimes

BUFFERS = 2
"""Groups whose rows may be on the accelerator or on their way there."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one layer for one group of sequences."""

    sent_s: float  # The link's work; of it, what comes before the last activations are there.
    landed_s: float = 0.0
    # The accelerator's work: recomputation, and all else but `attend_s`. Of recomputation, what can only begin with the
    # last activations: all of it, where they come whole.
    recompute_s: float = 0.0
    layer_s: float = 0.0
    last_s: float = 0.0
    host_s: float = 0.0  # Attention on the host, from when the layer's queries are there.
    attend_s: float = 0.0  # Attention to cached tokens, once all of them are there; the host attends meanwhile.
    outside_s: float = 0.0  # The accelerator's work between the last layer of a step and the first of the next.

    @property
    def attended_s(self) -> float:
        """Seconds from a layer's queries to the end of its attention, here and on the host."""
        return max(self.attend_s, self.host_s)


def layer_times(group: GroupPrices, split: Split, *, outside_s: float = 0.0) -> StepTimes:
    """Seconds of a layer for a group whose tokens are split so."""
    prices, chunks = group.layer, split.chunks
    inputs_s, rows_s = map(float, group.sent_seconds(split.recomputed, split.on_host))
    landed = inputs_s + chunks * prices.transfer_s
    last = split.recomputed - split.chunk * (chunks - 1)
    return StepTimes(
        sent_s=landed + rows_s + (prices.transfer_s if split.streamed or group.kept_here else 0.0),
        landed_s=landed,
        recompute_s=prices.recompute_s * split.recomputed + chunks * prices.launch_s,
        layer_s=prices.device_s,
        last_s=prices.launch_s + prices.recompute_s * last if chunks else 0.0,
        host_s=float(group.host_seconds(split.on_host)),
        attend_s=prices.attend_s * (split.tokens + group.kept_here - split.on_host),
        outside_s=outside_s,
    )


def step_seconds(
    groups: Sequence[StepTimes], layers: int, weights: WeightTimes = RESIDENT, *, ahead: bool = True
) -> float:
    """Seconds from step to step once the pipeline is full; `outside_s` of the first group counts.

    The slowest of all circles sets the pace: the link's work of all layers, the accelerator's work of all layers and
    between steps, or the link's work of those layers for which no buffer was free, between the last attention of one
    layer (of one step) and the first attention of the next. `ahead` says whether the first transfers of a step come
    while the step before ends; with beams, say, they cannot.
    """
    first, last, outside_s = groups[0], groups[-1], groups[0].outside_s
    sent = sum(times.sent_s for times in groups) + weights.keys_s + weights.others_s
    dense = sum(times.layer_s for times in groups)
    busy = dense + sum(times.recompute_s + times.attended_s for times in groups)
    # Groups that find no free buffer while the accelerator goes on from one layer to the next.
    later = sum(times.sent_s for times in groups[BUFFERS:])
    between = last.attend_s + dense
    crossing = later + between + first.recompute_s + first.attended_s if later else 0.0
    pace = max(sent, busy, crossing)
    if ahead:
        waiting = layers - (1 if len(groups) > 1 else BUFFERS)
        edge = later + between + outside_s + first.recompute_s + first.attended_s
        return max(layers * pace, layers * busy + outside_s, waiting * max(sent, crossing) + edge)
    queries = max(first.landed_s + first.last_s, first.recompute_s)
    # Queries need the weights that come behind the rows of the first group.
    queries = max(queries, first.sent_s + weights.others_s / len(groups) if weights.others_s else 0.0)
    begun = weights.keys_s + max(queries + first.attended_s, first.sent_s + first.attend_s)
    rest = busy - first.recompute_s - first.attended_s
    return outside_s + max(layers * sent + between, begun + rest + (layers - 1) * pace)
