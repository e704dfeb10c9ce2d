"""The least of several plans: by what each took lately, or else by what is predicted of it."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping

SAMPLES = 15
"""Latest steps of a plan whose median counts."""
ENOUGH = 3
"""Steps after which it is known what a plan takes."""
PROMISING = 1.35
"""Times slower than the best: a plan that is predicted to be no slower than that is tried."""
FRESH = 256
"""Steps for which what a plan took is believed. Then it is tried again: a disturbance may have driven it away."""
MARGIN = 0.01
"""The plan in use stays unless another is faster by more than this part."""
REVIEW = 8
"""Steps of the plan in use after which it is compared with the others again."""
GROWN = 8
"""It is compared at once where the number of cached tokens has changed by more than this fraction of it."""


class Auto:
    """The choice between plans.

    A step is timed from its end to the end of the one before, which needs no look into the accelerator. Predictions err
    by how a plan's transfers, copies and threads hamper each other, so what a plan's latest steps took counts instead,
    a median. A plan that has taken none is tried where it may be the best. Without `explore` nothing is tried.
    """

    def __init__(self, *, explore: bool = True):
        self._explore = explore
        # Of each plan: number of the step, cached tokens and seconds.
        self._took: defaultdict[str, deque[tuple[int, int, float]]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._held: str | None = None
        self._trying = False
        self._step = self._reviewed = self._left = 0

    @property
    def settled(self) -> bool:
        """Whether it is known what the plan in use takes."""
        return self._held is not None and len(self._took[self._held]) >= ENOUGH

    def going_on(self, tokens: int) -> str | None:
        """The plan of a step over so many cached tokens if it need not be compared with others; else `choose` it."""
        if self._trying and self.settled:
            # Its trial has ended.
            self._left = 0
        grown = GROWN * abs(tokens - self._reviewed) > self._reviewed
        if self._held is None or grown or self._left <= 0:
            return None
        self._left, self._step = self._left - 1, self._step + 1
        return self._held

    def choose(self, predicted: Mapping[str, float], tokens: int) -> str:
        """The plan of the next step, by the predicted seconds of each, the plainest first."""
        known = {name for name in predicted if self._taken(name, tokens)}
        times = {name: self.seconds(name, predicted, tokens) for name in predicted}
        if self._explore and known:
            times |= {name: times[name] / PROMISING for name in predicted if name not in known}
        least = min(times, key=times.__getitem__)
        if self._held not in times or times[self._held] * (1 - MARGIN) > times[least]:
            self._held = least
            self._took[least].clear()
        self._trying = self._explore and not self.settled
        self._step, self._reviewed, self._left = self._step + 1, tokens, 2 * REVIEW if self._trying else REVIEW
        return self._held

    def observe(self, name: str, *, tokens: int, measured_s: float) -> None:
        """Take in a step of a plan that began as all of its kind do."""
        self._took[name].append((self._step, tokens, measured_s))

    def seconds(self, name: str, predicted: Mapping[str, float], tokens: int) -> float:
        """Seconds of a plan's step: as its latest ones took, or as predicted, corrected by how others' are."""
        if taken := self._taken(name, tokens):
            return statistics.median(taken)
        others = [
            statistics.median(took) / predicted[each] for each in predicted if (took := self._taken(each, tokens))
        ]
        return predicted[name] * (statistics.median(others) if others else 1.0)

    def _taken(self, name: str, tokens: int) -> list[float]:
        """Seconds of a plan's latest steps, each as of so many tokens: what fits one number need not fit another."""
        return [
            seconds * tokens / then
            for step, then, seconds in self._took.get(name, ())
            if self._step - step <= FRESH and tokens < 2 * then < 4 * tokens
        ]
