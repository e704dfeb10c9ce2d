"""The scheduler: how many cached tokens of a layer are resident, streamed, recomputed, or attended to on the host.

Every form of `megakv.costmodel.offload` is solved exactly over all integers, anew at every step; with rows on disk,
piece by piece (`megakv.costmodel.offload_disk`).
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
from megakv.costmodel.offload_disk import Lot, Piece, pieces
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


def _pieces(costs: LayerCosts, lots: Sequence[Lot], on_host: int, limit: int) -> Sequence[Piece]:
    return pieces(costs, lots, on_host) if lots else (Piece(0, limit, costs),)


def split_point(costs: LayerCosts, tokens: int, *, most: int | None = None, lots: Sequence[Lot] = ()) -> Division:
    """Equation 11: the split point with the shortest time by Equation 10.

    Parameters
    ----------
    costs : LayerCosts
        Row-by-row, with weights resident or offloaded, or column-by-column.
    tokens : int
        s'.
    most : int, optional
        Tokens that may be recomputed, where not all have activations.
    lots : sequence of Lot
        Where they lie, if some do on disk.

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
    found = _pieces(costs, lots, 0, limit)
    for first, last, recomputing, streaming in ranges:
        for piece in found:
            low, high = max(first, piece.first), min(last, piece.last)
            if low <= high:
                point, seconds = lowest_point(split_lines(piece.costs, tokens, recomputing, streaming), low, high)
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
    that can be best, but for recomputing nothing, and for sending no keys and values at all. With rows on disk that is
    so within each piece, but for chunks in which a piece begins or ends.
    """

    def __init__(
        self, costs: LayerCosts, tokens: int, *, resident: int, limit: int, chunk: int, lots: Sequence[Lot] = ()
    ):
        self._costs, self._tokens, self._resident = costs, tokens, resident
        self._limit, self._chunk, self._lots = limit, chunk, lots

    def best(self, on_host: int) -> tuple[int, float]:
        """It, and the layer's seconds without the host's: never more with more tokens on the host."""
        rest = self._tokens - self._resident - on_host
        limit = max(0, self._limit - on_host)
        parts = _pieces(self._costs, self._lots, on_host, limit)
        found = [lowest_point(self._lines(parts[0], on_host, 0, rest > 0), 0, 0)]
        for part in parts:
            low, high = max(1, part.first), min(part.last, limit, rest - 1)
            if low <= high:
                found += self._within(part, on_host, low, high, alone=len(parts) == 1)
        if limit == rest > 0:
            found.append(lowest_point(self._lines(parts[-1], on_host, -(-rest // self._chunk), False), rest, rest))
        best = found[0]
        for other in found[1:]:
            if _less(other[1], best[1]):
                best = other
        return best

    def _within(self, part: Piece, on_host: int, low: int, high: int, *, alone: bool) -> list[tuple[int, float]]:
        """What can be best of the split points of a piece."""
        first, last = -(-low // self._chunk), -(-high // self._chunk)
        begin = self._chunk * (first - 1)
        none, one = (
            [Line(line.at(begin), line.slope) for line in self._lines(part, on_host, chunks, True)]
            for chunks in (first - 1, first)
        )
        chunks = self._crossing(none, one, last - first + 1)
        found = {first - 2 + chunks, first - 1 + chunks} if chunks else set()
        if not alone:
            found |= {first, last}
        return [
            lowest_point(
                self._lines(part, on_host, index, True),
                max(low, self._chunk * (index - 1) + 1),
                min(high, self._chunk * index),
            )
            for index in sorted(found)
            if first <= index
        ]

    def _lines(self, part: Piece, on_host: int, chunks: int, streaming: bool) -> tuple[Line, ...]:
        return steady_lines(part.costs, self._tokens, self._resident, on_host, chunks, streaming)

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
    lots: Sequence[Lot] = (),
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
    lots : sequence of Lot
        Where they lie, if some do on disk. The number of tokens on the host is exact for one sequence, and for several
        that lie alike.
    """
    resident = min(resident, tokens)
    limit = _checked(tokens - resident, most) if recompute else 0
    rest = _Rest(costs, tokens, resident=resident, limit=limit, chunk=chunk, lots=lots)
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
