"""Which of several plans is the fastest here: each is predicted, tried once, and corrected by what its steps took."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

SAMPLES = 15
"""Latest steps of a plan whose median ratio counts."""
ENOUGH = 4
"""Steps after which a plan's ratio is known."""
TRIAL = 3
"""Steps of a trial. The first does not count: it ends what the plan before began."""
PROMISING = 1.35
"""Times slower than the plan in use: what is predicted to be no slower than that is tried at once."""
SHARE = 0.01
"""Of all steps, what trials of the other plans may cost."""
FRESH = 32
"""Steps for which what a plan took stands beside what others take, and after which one that was in use is tried again:
a disturbance may have driven it away."""
MARGIN = 0.01
"""The plan in use stays unless another is faster by more than this part."""
REVIEW = 8
"""Steps of the plan in use after which it is compared with the others again."""
GROWN = 8
"""It is compared at once where the number of cached tokens has changed by more than this fraction of it."""


@dataclass
class _Known:
    """Cached tokens and measured over predicted seconds of a plan's latest steps, and the number of the last of them;
    how often it lost a trial, and when it may have the next."""

    ratios: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    latest: int = -FRESH
    lost: int = 0
    due: int = 0


class Auto:
    """The choice between plans.

    A step is timed from its end to the end of the one before, which needs no look into the accelerator. Predictions err
    by what they do not know of a machine: how a plan's transfers, copies and threads hamper each other. That error is
    much the same from step to step, so each plan has one ratio of measured to predicted seconds, a median.

    A plan that has lost waits, the longer the slower it was and the more often it lost, so that all trials together
    slow a long generation by `SHARE`. A machine may change meanwhile: what a plan took long ago is no reason to use it,
    but to try it again. Without `explore` nothing is tried.
    """

    def __init__(self, *, explore: bool = True):
        self._explore = explore
        self._plans: defaultdict[str, _Known] = defaultdict(_Known)
        self._held: str | None = None
        self._tried: str | None = None
        self._trying = False
        self._left = self._step = self._reviewed = 0
        self._previous: str | None = None

    def going_on(self, tokens: int) -> str | None:
        """The plan of a step over so many cached tokens if it need not be compared with others; else `choose` it."""
        if not self._left or (not self._trying and GROWN * abs(tokens - self._reviewed) > self._reviewed):
            return None
        return self._next()

    def choose(self, predicted: Mapping[str, float], tokens: int) -> str:
        """The plan of the next step, by the uncorrected seconds of each, the plainest first."""
        if self._trying and self._held in predicted:
            # What the last step of a trial took is not known before the next one has begun, nor, where several ranks
            # agree, before the one after that.
            self._trying, self._left = False, 2
            return self._next()
        times = {name: seconds * self.correction(name, tokens) for name, seconds in predicted.items()}
        before, self._held, self._reviewed = self._held, self._fastest(times, tokens), tokens
        if self._tried in times and self._tried != self._held:
            tried = self._plans[self._tried]
            tried.lost, tried.due = tried.lost + 1, self._step + self._wait(times, self._tried)
        if before is not None and before != self._held:
            self._plans[before].lost, self._plans[before].due = 0, self._step + FRESH
        self._tried = self._worth_trying(times, tokens) if self._explore else None
        self._trying = self._tried is not None
        self._left = TRIAL if self._trying else REVIEW if self._ratios(self._held, tokens) else ENOUGH
        if self._tried is not None:
            self._plans[self._tried].ratios.clear()
        return self._next()

    def observe(self, name: str, *, tokens: int, predicted_s: float, measured_s: float, steady: bool = True) -> None:
        """Take in a step of a plan, with its uncorrected prediction; `steady` as in `StepRecord`."""
        if steady and self._previous == name and predicted_s > 0:
            self._plans[name].ratios.append((tokens, measured_s / predicted_s))
            self._plans[name].latest = self._step
        self._previous = name

    def correction(self, name: str, tokens: int) -> float:
        """Measured over predicted seconds of a plan at about so many cached tokens; of all plans if it has no step."""
        found = self._ratios(name, tokens) or [
            statistics.median(ratios) for other in self._plans if (ratios := self._ratios(other, tokens))
        ]
        return statistics.median(found) if found else 1.0

    def _next(self) -> str:
        self._step += 1
        self._left -= 1
        name = self._tried if self._trying else self._held
        assert name is not None
        return name

    def _fastest(self, times: Mapping[str, float], tokens: int) -> str:
        """The plan to use: the one in use, or the plainest to begin with, unless another is known to be faster."""
        held = self._held
        if self._explore and held in times and self._ratios(held, tokens):
            times = {name: seconds for name, seconds in times.items() if name == held or self._fresh(name, tokens)}
        least = min(times.values())
        close = [name for name, seconds in times.items() if seconds * (1 - MARGIN) <= least]
        return held if held in close else close[0]

    def _worth_trying(self, times: Mapping[str, float], tokens: int) -> str | None:
        """Of the plans that are not known, or not any more, the fastest that is promising or has waited enough."""
        assert self._held is not None
        if not self._ratios(self._held, tokens):
            return None
        held_s = times[self._held]
        found = []
        for name, seconds in times.items():
            known = self._plans[name]
            promising = seconds <= (1 - MARGIN if self._ratios(name, tokens) else PROMISING) * held_s
            due = self._step >= (known.due or self._wait(times, name))
            if name != self._held and (due or (promising and not self._fresh(name, tokens))):
                found.append((seconds, name))
        return min(found)[1] if found else None

    def _wait(self, times: Mapping[str, float], name: str) -> int:
        """Steps of the plan in use over which a trial of another costs no more than its share of them."""
        assert self._held is not None
        cost = TRIAL * (times[name] / times[self._held] - 1)
        return max(FRESH, round(cost * (len(times) - 1) / SHARE)) << min(self._plans[name].lost, FRESH)

    def _fresh(self, name: str, tokens: int) -> bool:
        return self._plans[name].latest > self._step - FRESH and len(self._ratios(name, tokens)) > 0

    def _ratios(self, name: str | None, tokens: int) -> list[float]:
        """Those of steps with about as many tokens: what fits one size need not fit another."""
        known = self._plans[name].ratios if name and name in self._plans else ()
        return [ratio for then, ratio in known if tokens < 2 * then < 4 * tokens]
