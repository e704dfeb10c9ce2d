"""Seconds of a step of offloaded layers, row by row or column by column (KVPR, Figures 3 and 4), weights included.

Column by column, the sequences of a batch are attended to in groups, one behind the other within each layer; a layer's
weights are sent once for all of them. Row by row is the case of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megakv.offload.equations import RESIDENT, GroupCosts, WeightTimes
from megakv.offload.method import Split

EQUAL = 1e-10
"""Of a layer's time: states of the pipeline closer than this count as the same."""
PERIODS = (1, 2)
"""Layers after which a full pipeline may be in the same state again: there are two buffers."""


@dataclass(frozen=True)
class StepTimes:
    """What one layer takes, in seconds."""

    sent_s: float  # The link's work; of it, what comes before the last activations are there.
    landed_s: float
    # The accelerator's work: recomputation, and all else but `attend_s`. Of recomputation, what can only begin with the
    # last activations: all of it, where they come whole.
    recompute_s: float
    layer_s: float
    last_s: float
    host_s: float = 0.0  # Attention on the host, from when the layer's queries are there.
    outside_s: float = 0.0  # The accelerator's work between the last layer of a step and the first of the next.
    first_s: float = 0.0  # Of the link's work, what comes before the first activations are there.
    attend_s: float = 0.0  # Attention to cached tokens, once all of them are there; the host attends meanwhile.


def layer_times(group: GroupCosts, split: Split, *, outside_s: float = 0.0) -> StepTimes:
    """What a layer takes for a group whose tokens are split so; all chunks land at their mean rate."""
    costs, chunks, on_host = group.layer, split.chunks, split.on_host + group.kept - group.kept_here
    inputs_s, rows_s = map(float, group.sent_seconds(split.recomputed, split.on_host))
    landed = inputs_s + chunks * costs.transfer_s
    last = split.recomputed - split.chunk * (chunks - 1)
    first_s = inputs_s / split.recomputed * min(split.chunk, split.recomputed) if chunks else 0.0
    return StepTimes(
        sent_s=landed + rows_s + (costs.transfer_s if split.streamed or group.kept_here else 0.0),
        landed_s=landed,
        recompute_s=costs.recompute_s * split.recomputed + chunks * costs.launch_s,
        last_s=costs.launch_s + costs.recompute_s * last if chunks else 0.0,
        layer_s=costs.device_s,
        host_s=costs.host_fixed_s + costs.host_attend_s * on_host if on_host else 0.0,
        outside_s=outside_s,
        first_s=costs.transfer_s + first_s if chunks else 0.0,
        attend_s=costs.attend_s * (split.tokens + group.kept_here - split.on_host),
    )


class Moments(NamedTuple):
    """Of one group in one layer: when its transfers began and ended, and what the accelerator does ended."""

    begun: float
    sent: float
    queries: float
    attended: float


class Pipeline:
    """When the link and the accelerator are free, layer after layer.

    A group's transfers begin when one of two buffers is free: when the group before the last has attended. Its
    recomputation begins with the first activations at the earliest and ends with the last ones, its attention begins
    when everything is there. A layer's weights, but for W_K and W_V, come into the place of those of the layer before
    the last, once that has ended.
    """

    def __init__(self, groups: Sequence[StepTimes], weights: WeightTimes, ahead: bool):
        self.device = 0.0
        self.weights_there = 0.0  # When the weights of the last layer were.
        self._runs_ahead = ahead
        self._groups = groups
        self.weights = weights
        self._link = 0.0
        self._released = [0.0, 0.0]
        self._ended = [0.0, 0.0]
        # When weights are there: pieces of the layer under way, and of those behind it. They run ahead of the groups
        # that they are sent with by as many groups as are in the buffers' way.
        self._pieces: list[float] = []
        self._ahead = max(0, len(groups) - 2)

    def step(self, layers: int) -> float:
        """Seconds of the next step."""
        begun, left = self.device, layers
        if not self._runs_ahead:
            self._link = max(self._link, begun)
        passed: list[tuple[tuple[float, ...], float]] = []
        while left:
            self.layer(self._groups)
            left -= 1
            state = self.state()
            for period in PERIODS:
                if period <= min(len(passed), left) and _same(state, passed[-period][0], self.device / layers):
                    # From here on every layer is like the ones before.
                    times = left // period
                    self._shift(times * (self.device - passed[-period][1]))
                    left -= times * period
                    passed.clear()
                    break
            else:
                passed.append((state, self.device))
        self.device += self._groups[0].outside_s
        return self.device - begun

    def state(self) -> tuple[float, ...]:
        now = self.device
        return tuple(at - now for at in (self._link, *self._released, *self._ended, *self._pieces))

    def _shift(self, seconds: float) -> None:
        self.device += seconds
        self._link += seconds
        for moments in (self._released, self._ended, self._pieces):
            moments[:] = [at + seconds for at in moments]

    def layer(self, groups: Sequence[StepTimes]) -> list[Moments]:
        """The next layer of all groups, as long as it takes them."""
        count, weights, pieces = len(groups), self.weights, self._pieces
        link, device, moments = self._link, self.device, []
        for index, times in enumerate(groups):
            begun = max(link, self._released[0]) + (weights.keys_s if index == 0 else 0.0)
            landed, sent = begun + times.landed_s, begun + times.sent_s
            link = sent
            while len(pieces) <= index + self._ahead:
                link = max(link, self._ended[len(pieces) // count]) + weights.others_s / count
                pieces.append(link)
            if index == 0:
                # The queries' weights come in the first piece.
                device = max(device, pieces[0])
            queries = max(device + times.recompute_s, landed + times.last_s)
            if times.recompute_s:
                queries = max(queries, begun + times.first_s + times.recompute_s)
            device = max(queries + times.host_s, max(queries, sent) + times.attend_s)
            moments.append(Moments(begun, sent, queries, device))
            self._released = [self._released[1], device]
        # Groups have attention of their own; projections and feed-forward are computed for all sequences at once.
        device = max(device + sum(times.layer_s for times in groups), pieces[count - 1])
        self._ended = [self._ended[1], device]
        self._link, self.device = link, device
        self.weights_there = pieces[count - 1]
        del pieces[:count]
        return moments


def _same(one: Sequence[float], other: Sequence[float], scale: float) -> bool:
    return all(abs(a - b) <= EQUAL * scale for a, b in zip(one, other, strict=True))


def step_seconds(
    groups: Sequence[StepTimes],
    layers: int,
    weights: WeightTimes = RESIDENT,
    *,
    ahead: bool = True,
    rounds: int = 4,
) -> float:
    """Seconds from step to step once the pipeline is full; `outside_s` of the first group counts.

    `ahead`: whether the first transfers of a step come while the step before ends; with beams, say, they cannot.
    """
    pipeline = Pipeline(groups, weights, ahead)
    took, state = pipeline.step(layers), pipeline.state()
    for _ in range(rounds - 1):
        before = state
        took, state = pipeline.step(layers), pipeline.state()
        if _same(before, state, took):
            break
    return took
