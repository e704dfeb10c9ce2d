"""Seconds of a step of offloaded layers, row by row or column by column (KVPR, Figures 3 and 4), weights included.

Column by column, the sequences of a batch are attended to in groups, one behind the other within each layer; a layer's
weights are sent once for all of them. Row by row is the case of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megakv.costmodel.offload import LayerCosts, StepTimes

EQUAL = 1e-10
"""Of a layer's time: states of the pipeline closer than this count as the same."""
PERIODS = (1, 2)
"""Layers after which a full pipeline may be in the same state again: there are two buffers."""


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
    costs: LayerCosts,
    recomputed: int,
    on_host: int,
    streamed: int,
    *,
    chunk: int,
    outside_s: float,
    resident: int = 0,
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
    resident : int
        Tokens that are on the accelerator already.
    """
    chunks = -(-recomputed // chunk)
    last = recomputed - chunk * (chunks - 1) if chunks else 0
    landed = costs.activation_s * recomputed + chunks * costs.transfer_s
    recompute = costs.recompute_s * recomputed + chunks * costs.launch_s
    return StepTimes(
        sent_s=landed + costs.kv_s * streamed + (costs.transfer_s if streamed else 0.0),
        landed_s=landed,
        recompute_s=recompute,
        last_s=costs.launch_s + costs.recompute_s * last if chunks else 0.0,
        layer_s=costs.device_s,
        host_s=costs.host_fixed_s + costs.host_attend_s * on_host if on_host else 0.0,
        outside_s=outside_s,
        first_s=costs.transfer_s + costs.activation_s * min(chunk, recomputed) if chunks else 0.0,
        attend_s=costs.attend_s * (recomputed + streamed + resident),
    )


class _Pipeline:
    """When the link and the accelerator are free, layer after layer.

    A group's transfers begin when one of two buffers is free: when the group before the last has attended. Its
    recomputation begins with the first activations at the earliest and ends with the last ones, its attention begins
    when everything is there. A layer's weights, but for W_K and W_V, come into the place of those of the layer before
    the last, once that has ended.
    """

    def __init__(self, groups: Sequence[StepTimes], weights: WeightTimes, ahead: bool):
        self.device = 0.0
        self._runs_ahead = ahead
        self._groups = groups
        self._weights = weights
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
            self._layer()
            left -= 1
            state = self.state()
            for period in PERIODS:
                if period <= min(len(passed), left) and same(state, passed[-period][0], self.device / layers):
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
        """All that decides about the following layers, as seen from now."""
        now = self.device
        return tuple(at - now for at in (self._link, *self._released, *self._ended, *self._pieces))

    def _shift(self, seconds: float) -> None:
        self.device += seconds
        self._link += seconds
        for moments in (self._released, self._ended, self._pieces):
            moments[:] = [at + seconds for at in moments]

    def _layer(self) -> None:
        count, weights, pieces = len(self._groups), self._weights, self._pieces
        link, device = self._link, self.device
        for index, times in enumerate(self._groups):
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
            self._released = [self._released[1], device]
            device += times.layer_s
        device = max(device, pieces[count - 1])
        self._ended = [self._ended[1], device]
        self._link, self.device = link, device
        del pieces[:count]


def same(one: Sequence[float], other: Sequence[float], scale: float) -> bool:
    """Whether two states differ by next to nothing of some time."""
    return all(abs(a - b) <= EQUAL * scale for a, b in zip(one, other, strict=True))


def step_seconds(
    groups: Sequence[StepTimes],
    layers: int,
    weights: WeightTimes = RESIDENT,
    *,
    ahead: bool = True,
    rounds: int = 4,
) -> float:
    """Seconds from step to step once the pipeline is full.

    Parameters
    ----------
    groups : sequence of StepTimes
        A layer's, one for each group of sequences; `layer_s` is the group's part of the layer's other work, and
        `outside_s` that of the first counts.
    layers : int
    weights : WeightTimes
    ahead : bool
        Whether the first transfers of a step come while the step before ends; with beams, say, they cannot.
    rounds : int
        Steps that are played through at most; the last one counts.
    """
    pipeline = _Pipeline(groups, weights, ahead)
    took, state = pipeline.step(layers), pipeline.state()
    for _ in range(rounds - 1):
        before = state
        took, state = pipeline.step(layers), pipeline.state()
        if same(before, state, took):
            break
    return took
