"""The scheduler: how many cached tokens of a layer are resident, streamed, recomputed, or attended to on the host.

Every form of `megakv.costmodel.offload` is solved exactly over all integers, anew at every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megakv.costmodel.offload import (
    LayerCosts,
    Line,
    chunked_lines,
    host_seconds,
    split_lines,
    steady_lines,
)

EQUAL = 1e-12
"""Times closer than this, relatively, count as equal; then fewer tokens are treated specially."""


@dataclass(frozen=True)
class Division:
    """What becomes of a layer's cached tokens.

    Parameters
    ----------
    tokens : int
        All of them, s'.
    recomputed : int
        The split point l: the first tokens are recomputed from their activations.
    on_host : int
        Tokens that the host attends to where they lie.
    resident : int
        Tokens whose keys and values stay on the accelerator.
    seconds : float
        Predicted time of the layer.
    """

    tokens: int
    recomputed: int = 0
    on_host: int = 0
    resident: int = 0
    seconds: float = 0.0

    @property
    def streamed(self) -> int:
        """Tokens whose keys and values are sent."""
        return self.tokens - self.recomputed - self.on_host - self.resident


def together(divisions: Sequence[Division]) -> Division:
    """What becomes of the tokens of several groups, one behind the other."""
    return Division(
        sum(each.tokens for each in divisions),
        sum(each.recomputed for each in divisions),
        sum(each.on_host for each in divisions),
        sum(each.resident for each in divisions),
        sum(each.seconds for each in divisions),
    )


class Plan(NamedTuple):
    """What becomes of a layer's cached tokens, group by group, and how long a step takes that way.

    Parameters
    ----------
    name : str
        The method that it comes from; ``all`` where activations are recomputed and the host attends.
    divisions : tuple of Division
        Of each group of sequences that a layer attends to.
    chunk : int
        Tokens of a chunk of activations.
    seconds : float
        From step to step, as the costs have it.
    predicted_s : float
        The same, corrected by what steps of this plan took.
    """

    name: str
    divisions: tuple[Division, ...]
    chunk: int
    seconds: float
    predicted_s: float

    @property
    def division(self) -> Division:
        """Of all groups together."""
        return together(self.divisions)

    @property
    def shape(self) -> tuple[tuple[int, int, int], ...]:
        """What tells two plans apart: tokens recomputed, in how many chunks, and tokens on the host, by group."""
        return tuple((each.recomputed, -(-each.recomputed // self.chunk), each.on_host) for each in self.divisions)


def lowest_point(lines: Sequence[Line], low: int, high: int) -> tuple[int, float]:
    """The smallest integer in ``[low, high]`` at which the maximum of some lines is smallest, and that maximum.

    A maximum of lines is convex: its minimum lies at an end or beside a crossing.
    """
    found = {low, high}
    for index, first in enumerate(lines):
        for second in lines[index + 1 :]:
            steeper = first.slope - second.slope
            if steeper:
                crossing = (second.intercept - first.intercept) / steeper
                if low < crossing < high:
                    found |= {math.floor(crossing), math.ceil(crossing)}
    best, least = low, math.inf
    for point in sorted(found):
        value = max(line.at(point) for line in lines)
        if _less(value, least):
            best, least = point, value
    return best, least


def _less(value: float, other: float) -> bool:
    return value < other - EQUAL * abs(other) if other < math.inf else True


def _checked(tokens: int, most: int | None) -> int:
    """The largest split point: all tokens, or as many as have activations."""
    if tokens < 0:
        raise ValueError(f"{tokens} cached tokens: allowed: 0 or more")
    return tokens if most is None else min(tokens, most)


def split_point(costs: LayerCosts, tokens: int, *, most: int | None = None) -> Division:
    """Equation 11: the split point with the shortest time by Equation 10.

    Parameters
    ----------
    costs : LayerCosts
        Row-by-row, with weights resident or offloaded, or column-by-column.
    tokens : int
        s'.
    most : int, optional
        Tokens that may be recomputed, where not all have activations.

    Raises
    ------
    ValueError
        If there are fewer than no tokens.
    """
    limit = _checked(tokens, most)
    ranges = [(0, 0, False, tokens > 0), (1, min(limit, tokens - 1), True, True)]
    if limit == tokens > 0:
        ranges.append((tokens, tokens, True, False))
    best = Division(tokens, seconds=math.inf)
    for low, high, recomputing, streaming in ranges:
        if low <= high:
            point, seconds = lowest_point(split_lines(costs, tokens, recomputing, streaming), low, high)
            if _less(seconds, best.seconds):
                best = Division(tokens, point, seconds=seconds)
    return best


def _chunk_ranges(limit: int, tokens: int, chunk: int) -> list[tuple[int, int, int, bool]]:
    """Split points by the number of chunks: first, last, chunks, and whether keys and values are sent beside them."""
    ranges = [(0, 0, 0, tokens > 0)]
    for chunks in range(1, -(-limit // chunk) + 1):
        low, high = (chunks - 1) * chunk + 1, min(chunks * chunk, limit, tokens - 1)
        if low <= high:
            ranges.append((low, high, chunks, True))
    if limit == tokens > 0:
        ranges.append((tokens, tokens, -(-tokens // chunk), False))
    return ranges


def chunked_split_point(costs: LayerCosts, tokens: int, *, chunk: int, most: int | None = None) -> Division:
    """The best split point of a layer by itself, with activations in chunks of `chunk` tokens."""
    best = Division(tokens, seconds=math.inf)
    for low, high, chunks, streaming in _chunk_ranges(_checked(tokens, most), tokens, chunk):
        point, seconds = lowest_point(chunked_lines(costs, tokens, chunk, chunks, streaming), low, high)
        if _less(seconds, best.seconds):
            best = Division(tokens, point, seconds=seconds)
    return best


def divide(
    costs: LayerCosts,
    tokens: int,
    *,
    chunk: int,
    resident: int = 0,
    recompute: bool = True,
    host: int = 0,
    most: int | None = None,
) -> Division:
    """The fastest division of a layer's tokens among all that are allowed; plain streaming always is.

    Parameters
    ----------
    costs : LayerCosts
    tokens : int
        s'.
    chunk : int
        Tokens of a chunk of activations.
    resident : int
        Tokens that fit on the accelerator: as they cost nothing, all of these stay.
    recompute : bool
        Whether tokens may be recomputed.
    host : int
        Tokens that the host may attend to.
    most : int, optional
        Tokens of which there are activations, where not all have them; the host's come first among them.
    """
    resident = min(resident, tokens)
    limit = _checked(tokens - resident, most) if recompute else 0

    def beside(on_host: int) -> Division:
        """The best with that many tokens on the host; never slower with more, but for the host itself."""
        best = Division(tokens, 0, on_host, resident, math.inf)
        rest = tokens - resident - on_host
        for low, high, chunks, streaming in _chunk_ranges(max(0, limit - on_host), rest, chunk):
            lines = steady_lines(costs, tokens, resident, on_host, chunks, streaming)
            point, seconds = lowest_point(lines, low, high)
            seconds = max(seconds, host_seconds(costs, on_host))
            if _less(seconds, best.seconds):
                best = Division(tokens, point, on_host, resident, seconds)
        return best

    best = beside(0)
    if not host or resident == tokens:
        return best
    # What the others need falls with every token on the host, and the host's own time rises: where they cross.
    low, high = 1, min(host, tokens - resident)
    while low < high:
        middle = (low + high) // 2
        if beside(middle).seconds <= host_seconds(costs, middle):
            high = middle
        else:
            low = middle + 1
    for on_host in sorted({1, max(1, low - 1), low}):
        found = beside(on_host)
        if _less(found.seconds, best.seconds):
            best = found
    return best


def spread(total: int, limits: Sequence[int]) -> list[int]:
    """A split point for each sequence, as equal as their limits allow, with a given sum.

    Parameters
    ----------
    total : int
        Tokens of all sequences together, at most the sum of the limits.
    limits : sequence of int
        Tokens that each sequence can give.
    """
    assert 0 <= total <= sum(limits)
    shares = [0] * len(limits)
    left = total
    order = sorted(range(len(limits)), key=lambda index: limits[index])
    for place, index in enumerate(order):
        shares[index] = min(limits[index], -(-left // (len(order) - place)))
        left -= shares[index]
    return shares
