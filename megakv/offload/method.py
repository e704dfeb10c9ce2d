"""What becomes of a layer's cached tokens; what a way to decide that is, and the search that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megakv.offload.equations import GroupCosts

EQUAL = 1e-12
"""Times closer than this, relatively, count as equal; then fewer tokens are treated specially."""
POINTS = 512
"""Split points that are looked at together."""
TINY = 1e-300
"""Seconds per token of what would be divided by otherwise."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """What becomes of `tokens` cached tokens, s'.

    The first `recomputed` ones (the split point l) come from their activations, in chunks of `chunk` tokens; the host
    attends to `on_host` where they lie; `resident` ones never leave the accelerator.
    """

    tokens: int
    recomputed: int = 0
    on_host: int = 0
    resident: int = 0
    chunk: int = 0

    @property
    def streamed(self) -> int:
        """Tokens whose keys and values are sent."""
        return self.tokens - self.recomputed - self.on_host - self.resident

    @property
    def chunks(self) -> int:
        """Transfers that activations come in."""
        return -(-self.recomputed // self.chunk) if self.recomputed else 0

    def of_tokens(self, tokens: int) -> Split:
        """The same parts of another number of tokens, in a layer that sees more or fewer of them."""
        part = tokens / self.tokens if self.tokens else 0.0
        counts = {name: round(part * getattr(self, name)) for name in ("recomputed", "on_host", "resident")}
        return replace(self, tokens=tokens, **counts)


class Plan(NamedTuple):
    """A method's split for each group of sequences that a layer attends to, and how long a step takes that way.

    `seconds` is what the costs say, from step to step; `predicted_s` the same, corrected by what steps of it took.
    """

    name: str
    splits: tuple[Split, ...]
    seconds: float
    predicted_s: float
    kept_on_host: bool = False
    """Whether the host attends to what compression kept, where it lies."""

    def differs(self, other: Plan) -> bool:
        """Whether it treats tokens otherwise than another plan.

        With the freedom to do what does not pay, a plan is no other plan: it divides tokens in the same ways, only by
        costs that other steps showed. Recomputing in chunks is another way than recomputing all at once.
        """

        def counts(plan: Plan) -> list[tuple[int, int, int]]:
            return [(each.recomputed, each.chunks, each.on_host) for each in plan.splits]

        def ways(plan: Plan) -> tuple[bool, bool, bool]:
            recomputes = any(each.recomputed for each in plan.splits)
            hosted = plan.kept_on_host or any(each.on_host for each in plan.splits)
            return recomputes, hosted, recomputes and plan.name == "kvpr"

        alike = counts(self) == counts(other) and self.kept_on_host == other.kept_on_host
        return not alike and ways(self) != ways(other)


def spread(total: int, limits: Sequence[int]) -> list[int]:
    """Shares with a given sum, as equal as each one's limit allows; `total` is at most the sum of the limits."""
    assert 0 <= total <= sum(limits)
    shares = [0] * len(limits)
    left = total
    order = sorted(range(len(limits)), key=lambda index: limits[index])
    for place, index in enumerate(order):
        shares[index] = min(limits[index], -(-left // (len(order) - place)))
        left -= shares[index]
    return shares


class OffloadMethod(Protocol):
    """A way to treat a layer's cached tokens: its first line is what the documentation says of it."""

    recomputes: bool
    """Whether it needs tokens' activations."""
    attends_on_host: bool
    """Whether it needs the host's processor to attend."""

    def split(self, costs: GroupCosts) -> Split | None:
        """The fastest split that it allows; None where what is cached allows none."""


def lowest(seconds: Callable[[IntArray], Any], limit: int, chunk: int) -> int:
    """The split point of at most `limit` with the least seconds.

    All multiples of a chunk are looked at first, or a part of them, then all points around the best one: between two
    multiples, and from one multiple to the next, times fall and then rise.
    """
    low, high, stride = 0, limit, chunk * max(1, -(-limit // (chunk * POINTS)))
    while True:
        points = np.unique(np.append(np.arange(low, high + 1, stride), (0, min(1, limit), limit)))
        times = seconds(points)
        best = int(points[np.argmax(times <= times.min() * (1 + EQUAL))])
        if stride == 1:
            return best
        low, high = max(0, best - stride), min(limit, best + stride)
        if stride > chunk:
            low, stride = low // chunk * chunk, chunk * max(1, -(-2 * stride // (chunk * POINTS)))
        else:
            stride = max(1, -(-2 * stride // POINTS) if stride < chunk else -(-2 * chunk // POINTS))


def steady_split(costs: GroupCosts, *, recompute: bool, host: bool) -> Split:
    """The fastest split of a layer among many, by the busiest of link, accelerator and host."""
    limit = min(costs.away, costs.inputs) if recompute else 0
    most = min(costs.away, costs.host) if host else 0

    def on_host(points: IntArray) -> IntArray:
        """Tokens on the host beside each split point that can be best: ``[4, n]``.

        More of them speed the others up and slow the host down: the best number is where both meet.
        """
        none, last = np.zeros_like(points), np.where(points > 0, np.minimum(most, limit - points), most)
        if not costs.placements:
            # Straight lines all of them.
            layer = costs.layer
            fixed, rates = (
                float(costs.host_seconds(0)) or layer.device_s + layer.host_fixed_s,
                (layer.kv_s, layer.attend_s),
            )
            sides = zip(costs.side_seconds(points), rates, strict=True)
            meeting = [(side - fixed) / (rate + layer.host_attend_s + TINY) for side, rate in sides]
            low = np.clip(np.maximum(*meeting), 0, last).astype(np.int64)
            return np.stack([none, low, np.minimum(low + 1, last), last])
        low, high = none, last
        while (high - low > 1).any():
            middle = (low + high) // 2
            slower = costs.host_seconds(middle) >= costs.others_seconds(points, middle)
            low, high = np.where(slower, low, middle), np.where(slower, middle, high)
        return np.stack([none, low, high, last])

    def seconds(points: IntArray) -> Any:
        if not most:
            return costs.others_seconds(points)
        return costs.steady_seconds(points, on_host(points)).min(axis=0)

    recomputed = lowest(seconds, limit, costs.chunk)
    away = 0
    if most:
        counts = on_host(np.array([recomputed]))[:, 0]
        away = int(counts[np.argmin(costs.steady_seconds(np.full(4, recomputed), counts))])
    return Split(costs.tokens, recomputed, away, costs.resident, costs.chunk)
