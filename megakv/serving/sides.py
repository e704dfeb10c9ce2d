"""Sides of a model's original length, where its rotary frequencies follow the length: a pass is of one side."""

from __future__ import annotations

from collections.abc import Sequence

from megakv.injection.policy import RopeSides
from megakv.serving.answer import Answer


class SideTurns:
    """The turns of sides: of those that have work, the one that waits longest has the next pass."""

    def __init__(self, sides: RopeSides | None):
        self.sides = sides
        # The last one behind.
        self._served: list[int] = []

    def next(self, running: Sequence[Answer]) -> list[Answer]:
        """Those of the side that has the next pass."""
        if self.sides is None:
            return list(running)
        asked = {answer.side for answer in running if answer.state in ("reading", "decoding")}
        waiting = [side for side in self._served if side in asked]
        chosen = min(asked - {*waiting}, default=waiting[0] if waiting else 0)
        self._served = [*(side for side in waiting if side != chosen), chosen]
        return [answer for answer in running if answer.side == chosen]

    def leaves(self, answer: Answer) -> bool:
        """Whether an answer is read again from its beginning when it has one more token."""
        sides = self.sides
        return sides is not None and sides.restarts and sides.of(len(answer.tokens) + 1) != answer.side
