"""Which of several plans is the fastest here: what is predicted of each, corrected by what its steps took."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

SAMPLES = 9
"""Latest steps of a plan that count."""
BLOCK = 3
"""Steps of one plan in a row while plans are tried. The first does not count: it ends what the plan before began."""
ENOUGH = 4
"""Steps after which a plan's time is known."""
HOPELESS = 1.5
"""A plan that is predicted to be that many times slower than the best is not tried."""
MARGIN = 0.01
"""The plan in use stays unless another is faster by more than this part, and by more than its own steps differ."""
NEAR, RETRY = 1.1, 64
"""Plans that were slower by less than that are tried again after so many steps."""


@dataclass(frozen=True)
class _Sample:
    """What one step took: cached tokens, and measured over predicted seconds."""

    tokens: int
    ratio: float


class PlanTrials:
    """Steps of several plans, in turns at first, and the choice between them.

    A step is timed from its end to the end of the one before, which needs no look into the accelerator. Predictions err
    by what they do not know of a machine: how a plan's transfers, copies and threads hamper each other. That error is
    much the same from step to step, so each plan has its own, the median of its latest steps.

    Parameters
    ----------
    explore : bool
        Whether plans may be tried. Where several ranks wait for each other a step shows the slowest of all ranks'
        plans, so each goes by its predictions.
    """

    def __init__(self, *, explore: bool = True):
        self._explore = explore
        self._samples: dict[str, deque[_Sample]] = {}
        self._current: str | None = None
        self._held: str | None = None
        self._left = 0
        self._since_retry = 0
        self._retried: set[str] = set()
        self._previous: str | None = None

    def choose(self, predicted: Mapping[str, float], tokens: int) -> str:
        """The plan of the next step.

        Parameters
        ----------
        predicted : mapping of str to float
            Seconds of a step by plan, uncorrected, the plainest first.
        tokens : int
            Cached tokens of the step.
        """
        current = self._current
        if self._left and current is not None and current in predicted:
            self._left -= 1
            return current
        corrected = {name: seconds * self.correction(name, tokens) for name, seconds in predicted.items()}
        best = min(corrected, key=lambda name: corrected[name])
        trial = self._to_be_tried(corrected, best, tokens) if self._explore and len(predicted) > 1 else None
        if trial is not None:
            self._current, self._left = trial, BLOCK - 1
            return trial
        # Plans that are as good as the best: the one in use goes on, or the plainest begins.
        good = [name for name in corrected if corrected[name] * (1 - MARGIN) <= corrected[best]]
        held = self._held
        if (
            held is None
            or held not in corrected
            or corrected[held] * (1 - self._margin(held, tokens)) > corrected[best]
        ):
            held = good[0]
        self._held = self._current = held
        return held

    def _to_be_tried(self, corrected: Mapping[str, float], best: str, tokens: int) -> str | None:
        """A plan that is not known well enough and may be the best."""
        self._since_retry += 1
        if self._since_retry >= RETRY:
            self._since_retry = 0
            self._retried = {name for name in corrected if corrected[name] < NEAR * corrected[best]} - {best}
        unknown = {name: self._known(name, tokens) for name in corrected if self._known(name, tokens) < ENOUGH}
        hopeful = [name for name in unknown if corrected[name] <= HOPELESS * corrected[best]]
        if hopeful:
            return min(hopeful, key=lambda name: unknown[name])
        for name in corrected:
            if name in self._retried:
                self._retried.discard(name)
                return name
        return None

    def observe(self, name: str, *, tokens: int, predicted_s: float, measured_s: float) -> None:
        """Take in a step of a plan, with its uncorrected prediction."""
        if self._previous == name and predicted_s > 0:
            self._samples.setdefault(name, deque(maxlen=SAMPLES)).append(_Sample(tokens, measured_s / predicted_s))
        self._previous = name

    def correction(self, name: str, tokens: int) -> float:
        """Measured over predicted seconds of a plan at about so many cached tokens; of all plans if it has no step."""
        own = self._ratios(name, tokens)
        if not own:
            own = [statistics.median(ratios) for other in self._samples if (ratios := self._ratios(other, tokens))]
        return statistics.median(own) if own else 1.0

    def _margin(self, name: str, tokens: int) -> float:
        """By how much the steps of a plan differ: half the distance of their quartiles."""
        ratios = self._ratios(name, tokens)
        if len(ratios) < ENOUGH:
            return MARGIN
        low, middle, high = statistics.quantiles(ratios, n=4)
        return max(MARGIN, (high - low) / 2 / middle)

    def _known(self, name: str, tokens: int) -> int:
        return len(self._ratios(name, tokens))

    def _ratios(self, name: str, tokens: int) -> list[float]:
        """Those of steps with about as many tokens: what fits one size need not fit another."""
        return [sample.ratio for sample in self._samples.get(name, ()) if tokens < 2 * sample.tokens < 4 * tokens]
