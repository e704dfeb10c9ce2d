"""The scheduler: how many cached tokens of a layer are resident, streamed, recomputed, or attended to on the host.

Every form of `megakv.costmodel.offload` is solved exactly over all integers, anew at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megakv.costmodel.offload import (
    LayerCosts,
    Line,
    chunked_lines,
    host_seconds,
    split_lines,
    steady_lines,
)
from megakv.offload.division import Division

EQUAL = 1e-12
"""Times closer than this, relatively, count as equal; then fewer tokens are treated specially."""


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


class _Rest:
    """The best split point of a layer among many, beside any number of tokens on the host.

    With every full chunk of activations the link's time changes by one amount, and the accelerator's grows by another.
    Before the chunk at whose end the accelerator is the slower one, the link is waited for, so that the last of those
    chunks is best; behind it all is slower, as the accelerator is. So that chunk and the end of the one before are all
    that can be best, but for recomputing nothing, and for sending no keys and values at all.
    """

    def __init__(self, costs: LayerCosts, tokens: int, *, resident: int, limit: int, chunk: int):
        self._costs, self._tokens, self._resident = costs, tokens, resident
        self._limit, self._chunk = limit, chunk

    def best(self, on_host: int) -> tuple[int, float]:
        """It, and the layer's seconds without the host's: never more with more tokens on the host."""
        rest = self._tokens - self._resident - on_host
        limit = max(0, self._limit - on_host)
        none, all_sent = self._lines(on_host, 0, rest > 0), min(limit, rest - 1)
        found = [lowest_point(none, 0, 0)]
        if all_sent > 0:
            chunks = self._crossing(none, self._lines(on_host, 1, True), -(-all_sent // self._chunk))
            for index, low in ((chunks - 1, self._chunk * (chunks - 1)), (chunks, self._chunk * (chunks - 1) + 1)):
                if index > 0:
                    high = min(index * self._chunk, all_sent)
                    found.append(lowest_point(self._lines(on_host, index, True), low, high))
        if limit == rest > 0:
            found.append(lowest_point(self._lines(on_host, -(-rest // self._chunk), False), rest, rest))
        best = found[0]
        for other in found[1:]:
            if _less(other[1], best[1]):
                best = other
        return best

    def _lines(self, on_host: int, chunks: int, streaming: bool) -> tuple[Line, ...]:
        return steady_lines(self._costs, self._tokens, self._resident, on_host, chunks, streaming)

    def _crossing(self, none: Sequence[Line], one: Sequence[Line], last: int) -> int:
        """The first chunk at whose end the accelerator needs no less than the link, at most `last`; 0 if none pays."""
        gap = none[0].intercept - none[1].intercept
        link, device = (after.at(self._chunk) - before.intercept for before, after in zip(none, one, strict=True))
        if gap <= 0 or link >= 0:
            # The accelerator is the slower one already, or a full chunk costs the link more than it saves.
            return 0
        return min(last, max(1, math.ceil(gap / (device - link))))


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
    rest = _Rest(costs, tokens, resident=resident, limit=limit, chunk=chunk)
    choices = [0]
    if host and resident < tokens:
        # What the others need falls with every token on the host, and the host's own time rises: where they cross.
        crossing = _first_crossing(
            lambda count: rest.best(count)[1] - host_seconds(costs, count), min(host, tokens - resident)
        )
        choices += sorted({1, max(1, crossing - 1), crossing})
    best = Division(tokens, seconds=math.inf)
    for on_host in choices:
        point, seconds = rest.best(on_host)
        seconds = max(seconds, host_seconds(costs, on_host))
        if _less(seconds, best.seconds):
            best = Division(tokens, point, on_host, resident, seconds)
    return best


def _first_crossing(excess: Callable[[int], float], last: int) -> int:
    """The first integer from 1 on at which something that never rises again is 0 or less; `last` if none is.

    Straight lines through both ends of what is left find it in a few steps where it is nearly straight; halving
    takes turns with them, so that it never takes many.
    """
    low, high = 1, last
    over = excess(low)
    if over <= 0 or low == high:
        return low
    under = excess(high)
    if under > 0:
        return high
    halve = False
    while low + 1 < high:
        width = high - low
        middle = low + (width // 2 if halve else math.ceil(width * over / (over - under)))
        middle = min(max(middle, low + 1), high - 1)
        value = excess(middle)
        if value <= 0:
            high, under = middle, value
        else:
            low, over = middle, value
        halve = not halve and 2 * (high - low) > width
    return high


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
