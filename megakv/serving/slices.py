"""How far a pass goes on before it pauses for streams."""

from __future__ import annotations

from collections.abc import Sequence


class Slices:
    """Cuts passes into as few slices as there can be, by how long their parts were so far.

    Parts lie between the stops of `Pauses`: every other one is a layer's attention, and those of a kind are alike
    within a pass, but for the first, which has what comes before the layers.
    """

    def __init__(self, layers: int):
        self._stops = 2 * layers
        # The last stop that the pass reached, and its tokens.
        self._at, self._tokens = -1, 0
        # Seconds of the parts that end before attention, of those that end behind it, and of the first.
        self._parts, self._first = [0.0, 0.0], 0.0

    def begin(self, tokens: int, seconds: float, slice_s: float) -> int | None:
        """The stop at which a pass of so many tokens, which is to take so long in all, pauses first; None where none
        comes within that time.
        """
        self._first, self._parts = self._expected(tokens, seconds)
        self._tokens, self._at = tokens, -1
        return self.ahead(slice_s) - 1 if self._first <= slice_s else None

    def pauses(self, tokens: int, seconds: float, slice_s: float) -> float:
        """How many such a pass would have, and which part of the next one's time then has gone by."""
        first, parts = self._expected(tokens, seconds)
        count, reached = 0, 0.0
        for stop in range(self._stops + 1):
            part = parts[stop % 2] if stop else first
            if reached and reached + part > slice_s:
                count, reached = count + 1, 0.0
            reached += part
        return count + min(reached / slice_s, 1.0)

    def _expected(self, tokens: int, seconds: float) -> tuple[float, list[float]]:
        """How long the first part of such a pass will take, and those of each kind."""
        each = 2 * seconds / self._stops
        grown = tokens / self._tokens if self._tokens else 0.0
        dense = min(self._parts[0] * grown, 0.9 * each) if grown else each / 2
        return self._first * grown if grown else dense / 2, [dense, each - dense]

    def went(self, parts: Sequence[float]) -> None:
        """So long the latest parts took."""
        kinds: tuple[list[float], list[float]] = [], []
        for part in parts:
            self._at += 1
            if self._at:
                kinds[self._at % 2].append(part)
            else:
                self._first = part
        for kind, found in enumerate(kinds):
            if found:
                self._parts[kind] = sum(found) / len(found)

    @property
    def left_s(self) -> float:
        """How long the pass will go on, without its pauses."""
        return sum(self._parts[stop % 2] if stop else self._first for stop in range(self._at + 1, self._stops + 1))

    def ahead(self, slice_s: float) -> int:
        """Parts that come before the next pause: so many as fit into a slice, and one at least."""
        count, reached = 0, 0.0
        for stop in range(self._at + 1, self._stops + 1):
            reached += self._parts[stop % 2] if stop else self._first
            if count and reached > slice_s:
                break
            count += 1
        return max(count, 1)
