"""What becomes of a layer's cached tokens; the methods that decide it, and the search that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megakv.base.registry import Registry

if TYPE_CHECKING:
    # Whoever only names a method needs no prices.
    from megakv.offload.prices import GroupPrices

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

    `seconds` is what the prices say, from step to step; `predicted_s` goes by what the method's latest steps took.
    """

    name: str
    splits: tuple[Split, ...]
    seconds: float
    predicted_s: float
    kept_on_host: bool = False
    """Whether the host attends to what compression kept, where it lies."""


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

    def split(self, prices: GroupPrices) -> Split | None:
        """The fastest split that it allows; None where what is cached allows none."""


METHODS: Registry[OffloadMethod] = Registry(
    "offload method",
    {
        "stream": "megakv.offload.steady:Stream",
        "kvpr": "megakv.offload.kvpr:KVPR",
        "chunked": "megakv.offload.steady:Chunked",
        "cpu_rank": "megakv.offload.steady:CPURank",
        "all": "megakv.offload.steady:All",
    },
    make=lambda kind: kind(),
)
"""The plainest first: of equal ones `auto` takes the first."""
AUTO, PLAIN = "auto", "stream"
"""The fastest of all of them, and what is done where a method does not fit."""


def methods_of(name: str) -> Mapping[str, OffloadMethod]:
    """Those that ``megakv.offload.method`` asks for."""
    return METHODS if name == AUTO else {name: METHODS[name]}


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


def steady_split(prices: GroupPrices, *, recompute: bool, host: bool) -> Split:
    """The fastest split of a layer among many, by the busier of link and accelerator, which waits for the host."""
    limit = min(prices.away, prices.inputs) if recompute else 0
    most = min(prices.away, prices.host) if host else 0
    layer, kept_s = prices.layer, float(prices.host_seconds(0))

    def on_host(points: IntArray) -> IntArray:
        """Tokens on the host beside each split point that can be best: ``[4, n]``.

        More of them shorten transfers and attention here, and lengthen the host's: the best number is where those meet.
        """
        none, last = np.zeros_like(points), np.where(points > 0, np.minimum(most, limit - points), most)
        low, high, begun_s = none, last, layer.device_s + prices.recompute_seconds(points)
        if not prices.placements:
            # All of them are straight lines.
            sides = (prices.link_seconds(points) - begun_s, layer.kv_s), (prices.attend_seconds(), layer.attend_s)
            meeting = [(s - (kept_s or layer.host_fixed_s)) / (per + layer.host_attend_s + TINY) for s, per in sides]
            low = np.clip(np.maximum(*meeting), 0, last).astype(np.int64)
            return np.stack([none, low, np.minimum(low + 1, last), last])
        while (high - low > 1).any():
            middle = (low + high) // 2
            host_s = prices.host_seconds(middle)
            slower = host_s >= np.maximum(prices.attend_seconds(middle), prices.link_seconds(points, middle) - begun_s)
            low, high = np.where(slower, low, middle), np.where(slower, middle, high)
        return np.stack([none, low, high, last])

    def seconds(points: IntArray) -> Any:
        return prices.steady_seconds(points, on_host(points) if most else points[None] * 0).min(axis=0)

    recomputed = lowest(seconds, limit, prices.chunk)
    counts = on_host(np.array([recomputed]))[:, 0]
    away = int(counts[np.argmin(prices.steady_seconds(np.full(4, recomputed), counts))])
    return Split(prices.tokens, recomputed, away, prices.resident, prices.chunk)
