"""How long a pass will take, learned from those that were measured."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

SAMPLES = 48
"""Latest passes of either kind that count."""
RATIOS = 12
"""Of those with prompts, so many say by how much passes exceed what was predicted."""
FIRST_CHUNK = 32
"""New prompt tokens of the first pass."""
FIRST_CANDIDATES = 4
GROWTH = 2.0
"""How much more of anything than in any measured pass is trusted to a prediction."""
MARGIN_QUANTILE = 0.9
OUTLIER = 1.4
"""Times what fits the others best that a pass which counts takes at most."""

Sample = tuple[tuple[float, ...], float]
"""The row of a size, and seconds."""


@dataclass(frozen=True)
class PassSize:
    """What a pass computes: new tokens of prompts, of decoding one of each sequence, and what they attend to.

    `candidates` are those that were looked up for what comes behind the ones that decode.
    """

    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    """Tokens that each of them attends to, in all."""
    sequences: int = 0
    """That decode."""
    context: int = 0
    """Tokens that they attend to."""
    candidates: int = 0

    def with_prompt(self, past: int, new: int) -> PassSize:
        """This and more tokens of a prompt."""
        pairs = self.prompt_pairs + new * (past + new / 2)
        return PassSize(self.prompt_tokens + new, pairs, self.sequences, self.context, self.candidates)

    def row(self, *, many: bool) -> tuple[float, ...]:
        """Of what it takes shares of, those of its kind among them."""
        # What a pass takes in any case is more with many rows than with few.
        own = float(self.prompt_tokens > 0), float(self.prompt_tokens)
        other = 0.0, 0.0
        kinds = (*other, *own) if many else (*own, *other)
        candidates = float(self.candidates > 0), float(self.candidates)
        return (1.0, *kinds, self.prompt_pairs, self.sequences, self.context, *candidates)


class PassTimes:
    """Seconds of passes by their size: a sum over what is in it, each share at least 0, that fits the latest best.

    Beside attention, passes of up to `few` tokens have shares of their own: they may go another way through layers.
    """

    def __init__(self, few: float = math.inf) -> None:
        self.few = few
        # Passes of one kind would soon be all there is.
        self._samples: dict[str, deque[Sample]] = {
            kind: deque(maxlen=SAMPLES) for kind in ("single tokens", "candidates", "few", "many")
        }
        self._ratios: deque[float] = deque(maxlen=RATIOS)
        self._weights: np.ndarray | None = None
        self._most_prompt = self._most_candidates = 0
        self._stale = True

    def add(self, size: PassSize, seconds: float) -> None:
        """A pass was measured."""
        if size.prompt_tokens and (expected := self.seconds(size)):
            self._ratios.append(seconds / expected)
        many = self._many(size)
        single = "candidates" if size.candidates else "single tokens"
        kind = "many" if many else "few" if size.prompt_tokens else single
        self._samples[kind].append((size.row(many=many), max(seconds, 1e-6)))
        self._most_prompt = max(self._most_prompt, size.prompt_tokens)
        self._most_candidates = max(self._most_candidates, size.candidates)
        self._stale = True

    def seconds(self, size: PassSize) -> float:
        """0 where nothing was measured yet."""
        if self._stale:
            self._fit()
        if self._weights is None:
            return 0.0
        many = self._many(size)
        # Until one was measured, those of many are like those of few, and the other way round.
        if not self._samples["many" if many else "few"]:
            many = not many
        return float(np.dot(self._weights, size.row(many=many)))

    @property
    def margin(self) -> float:
        """By how much passes with prompts often exceed what was predicted."""
        return float(np.clip(np.quantile(self._ratios, MARGIN_QUANTILE), 1.0, 2.0)) if self._ratios else 1.0

    @property
    def trusted_prompt(self) -> int:
        """New prompt tokens up to which predictions are trusted."""
        return max(FIRST_CHUNK, int(GROWTH * self._most_prompt))

    @property
    def trusted_candidates(self) -> int:
        """Candidates up to which predictions are trusted."""
        return max(FIRST_CANDIDATES, int(GROWTH * self._most_candidates))

    def _many(self, size: PassSize) -> bool:
        return size.prompt_tokens > 0 and size.prompt_tokens + size.sequences > self.few

    def _fit(self) -> None:
        self._stale = False
        samples = [sample for own in self._samples.values() for sample in own]
        if not samples:
            return
        rows = np.array([row for row, _ in samples])
        seconds = np.array([second for _, second in samples])
        weights = _solved(rows, seconds)
        # What took far longer than like ones, as when a server starts, or a machine is busy, says nothing of others.
        like = seconds <= OUTLIER * (rows @ weights)
        self._weights = weights if like.all() else _solved(rows[like], seconds[like])


def _solved(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    # Relative errors count, and columns of like size are what the solver is good at.
    rows = rows / seconds[:, None]
    scale = np.maximum(rows.max(axis=0), 1e-12)
    weights: np.ndarray = nnls(rows / scale, np.ones(len(rows)))[0] / scale
    return weights
