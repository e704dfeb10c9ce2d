"""Which of several plans is the fastest here: what is predicted of each, corrected by what its steps took."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

SAMPLES = 25
"""Latest steps of a plan that count."""
BLOCK = 3
"""Steps of one plan in a row while plans are tried. The first does not count: it ends what the plan before began."""
SHORT = 2
"""The same for a plan that is not known at all and is predicted to be slow."""
ENOUGH = 4
"""Steps after which a plan's time is known."""
SLOW = 1.1
"""Times slower than the plan in use: such a plan is not worth a closer look."""
SHARE, GRANT = 0.01, 0.6
"""What trials may cost: that part of all steps, and so many steps at the beginning."""
FIRST, LAST = 64, 4096
"""Steps after which a plan that has lost is tried again: at first, and at most; twice as many each time."""
SOON = 32
"""The same for the plan in use, when another takes its place."""
FRESH = 32
"""Steps for which what a plan took stands beside what others take."""
MARGIN = 0.01
"""The plan in use stays unless another is faster by more than this part, and than chance would have it."""
REVIEW = 8
"""Steps of the plan in use after which it is compared with the others again."""
GROWN = 8
"""It is compared at once where the number of cached tokens has changed by more than this fraction of it."""


@dataclass(frozen=True)
class _Sample:
    """What one step took: its number, cached tokens, measured over predicted seconds, and measured ones."""

    step: int
    tokens: int
    ratio: float
    seconds: float


@dataclass
class _History:
    """What is known of a plan.

    Its latest steps, when it may be tried again, how long it waits after that, and tokens and seconds of a step when it
    was at its fastest.
    """

    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    due: int = 0
    wait: int = FIRST
    fastest: tuple[int, float] = 0, math.inf


class PlanTrials:
    """Steps of several plans, some of them trials, and the choice between them.

    A step is timed from its end to the end of the one before, which needs no look into the accelerator. Predictions err
    by what they do not know of a machine: how a plan's transfers, copies and threads hamper each other. That error is
    much the same from step to step, so each plan has its own, the median of its latest steps.

    Every plan is tried at some time, however slow it is predicted to be, but trials have to be paid for: all steps save
    up a hundredth of a step each, and a trial takes from that what it costs beyond the plan in use. So trials slow a
    long generation by one per cent, the likely ones come at once and the unlikely ones late. A machine may change
    meanwhile, so no plan is taken for what it was long ago: it is tried again first. It may have been disturbed when it
    lost: what that would cost is judged by the plan at its fastest, and the plan that was in use is tried again soon.

    Parameters
    ----------
    explore : bool
        Whether plans may be tried.
    """

    def __init__(self, *, explore: bool = True):
        self._explore = explore
        self._plans: dict[str, _History] = {}
        self._held: str | None = None
        self._tried: str | None = None
        self._trying = False
        self._left = 0
        self._reviewed = 0
        self._step = 0
        self._saved = GRANT
        self._length = 0
        self._previous: str | None = None

    def going_on(self, tokens: int) -> str | None:
        """The plan of the next step where it need not be compared with others; `choose` is then left out.

        Parameters
        ----------
        tokens : int
            Cached tokens of the step.
        """
        if not self._left or self._held is None:
            return None
        if not self._trying and (
            GROWN * abs(tokens - self._reviewed) > self._reviewed
            or (self._explore and not self._known(self._held, tokens))
        ):
            return None
        self._left -= 1
        return self._next(self._trying)

    def choose(self, predicted: Mapping[str, float], tokens: int) -> str:
        """The plan of the next step.

        Parameters
        ----------
        predicted : mapping of str to float
            Seconds of a step by plan, uncorrected, the plainest first.
        tokens : int
            Cached tokens of the step.
        """
        corrected = {name: seconds * self.correction(name, tokens) for name, seconds in predicted.items()}
        before, self._held = self._held, self._best(corrected, tokens)
        if before is not None and before != self._held:
            # It was the fastest: a disturbance may have driven it away.
            history = self._history(before)
            history.due, history.wait = self._step + SOON, SOON
        self._reviewed = tokens
        if self._trying:
            # What the last step of a trial took is not known before the next one has begun, nor, where several ranks
            # agree, before the one after that.
            self._trying, self._left = False, 1
            return self._next(trial=False)
        self._put_off(corrected, tokens)
        trial = self._worth_trying(corrected, tokens) if self._explore else None
        if trial is None:
            self._left = REVIEW - 1
            return self._next(trial=False)
        self._length = self._steps(corrected, trial, tokens)
        self._tried, self._trying, self._left = trial, True, self._length - 1
        samples = self._history(trial).samples
        while samples and samples[0].step < self._step - FRESH:
            samples.popleft()
        return self._next(trial=True)

    def observe(self, name: str, *, tokens: int, predicted_s: float, measured_s: float, steady: bool = True) -> None:
        """Take in a step of a plan, with its uncorrected prediction; `steady` as in `StepRecord`."""
        if steady and self._previous == name and predicted_s > 0:
            history = self._history(name)
            history.samples.append(_Sample(self._step, tokens, measured_s / predicted_s, measured_s))
            latest = [sample.seconds for sample in history.samples][-ENOUGH:]
            if len(latest) == ENOUGH and statistics.median(latest) < self._hoped_s(name, tokens):
                history.fastest = tokens, statistics.median(latest)
        self._previous = name

    def correction(self, name: str, tokens: int) -> float:
        """Measured over predicted seconds of a plan at about so many cached tokens; of all plans if it has no step."""
        own = self._ratios(name, tokens)
        if not own:
            own = [statistics.median(ratios) for other in self._plans if (ratios := self._ratios(other, tokens))]
        return statistics.median(own) if own else 1.0

    # Inside

    def _next(self, trial: bool) -> str:
        self._step += 1
        name = self._tried if trial else self._held
        assert name is not None
        if not trial:
            self._saved += SHARE
        return name

    def _best(self, corrected: Mapping[str, float], tokens: int) -> str:
        """The plan to use: the one in use, or the plainest to begin with, unless another is known to be faster."""
        held = self._held
        allowed = dict(corrected)
        if self._explore and held is not None and held in corrected and self._known(held, tokens):
            allowed = {name: seconds for name, seconds in corrected.items() if name == held or self._fresh(name)}
        best = min(allowed, key=lambda name: allowed[name])
        if held in allowed and allowed[held] * (1 - self._margin(held, best, tokens)) <= allowed[best]:
            return held
        return next(name for name in allowed if allowed[name] * (1 - MARGIN) <= allowed[best])

    def _put_off(self, corrected: Mapping[str, float], tokens: int) -> None:
        """The plan that was tried last waits, unless it won or needs a closer look."""
        tried, self._tried = self._tried, None
        if tried is None or tried == self._held or tried not in corrected:
            return
        # By all that is known of it: what disturbed a single step was not its fault.
        self._saved -= max(0.0, self._cost(corrected, tried, self._length))
        if self._known(tried, tokens) >= ENOUGH or corrected[tried] > SLOW * corrected[self._held or tried]:
            history = self._history(tried)
            history.due, history.wait = self._step + history.wait, min(2 * history.wait, LAST)

    def _worth_trying(self, corrected: Mapping[str, float], tokens: int) -> str | None:
        """The cheapest trial that is due and can be paid for, of plans that are not known first."""
        held = self._held
        assert held is not None
        if self._known(held, tokens) < ENOUGH:
            return None
        found: list[tuple[bool, float, str]] = []
        for name in corrected:
            known = self._known(name, tokens)
            hoped_s = min(corrected[name], self._hoped_s(name, tokens))
            cost = self._cost({**corrected, name: hoped_s}, name, self._steps(corrected, name, tokens))
            # What would be faster by all that is known of it is looked at again at once: the plan in use may have been
            # lucky when it was chosen.
            faster = corrected[name] < (1 - MARGIN) * corrected[held]
            due = not known or faster or self._history(name).due <= self._step
            if name != held and due and cost <= max(0.0, self._saved):
                found.append((known >= ENOUGH, cost, name))
        return min(found)[2] if found else None

    def _cost(self, corrected: Mapping[str, float], name: str, steps: int) -> float:
        """Steps' worth of time that so many steps of a plan cost beyond the plan in use."""
        assert self._held is not None
        return steps * (corrected[name] / corrected[self._held] - 1)

    def _hoped_s(self, name: str, tokens: int) -> float:
        """Seconds of a step if a plan were as fast as ever; what slowed it since then may be over."""
        then, seconds = self._history(name).fastest
        return seconds * max(1.0, tokens / then) if then else math.inf

    def _steps(self, corrected: Mapping[str, float], name: str, tokens: int) -> int:
        """How many steps a trial of a plan has."""
        slow = corrected[name] > SLOW * corrected[self._held or name]
        return SHORT if slow and not self._known(name, tokens) else BLOCK

    def _margin(self, held: str, other: str, tokens: int) -> float:
        """By how much another plan must be faster: by more than half of what medians of so many steps err by."""
        variance = sum(self._error(name, tokens) ** 2 for name in (held, other))
        return max(MARGIN, variance**0.5 / 2)

    def _error(self, name: str, tokens: int) -> float:
        """Standard error of the median of a plan's steps, relatively, from the distance of their quartiles."""
        ratios = self._ratios(name, tokens)
        if len(ratios) < ENOUGH:
            return 0.0
        low, middle, high = statistics.quantiles(ratios, n=4)
        return 0.93 * (high - low) / middle / len(ratios) ** 0.5

    def _history(self, name: str) -> _History:
        return self._plans.setdefault(name, _History())

    def _fresh(self, name: str) -> bool:
        samples = self._history(name).samples
        return bool(samples) and samples[-1].step >= self._step - FRESH

    def _known(self, name: str, tokens: int) -> int:
        return len(self._ratios(name, tokens))

    def _ratios(self, name: str, tokens: int) -> list[float]:
        """Those of steps with about as many tokens: what fits one size need not fit another."""
        samples = self._plans[name].samples if name in self._plans else ()
        return [sample.ratio for sample in samples if tokens < 2 * sample.tokens < 4 * tokens]
