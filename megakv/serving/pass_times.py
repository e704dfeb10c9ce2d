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
GROWTH = 2.0
"""How much more of anything than in any measured pass is trusted to a prediction."""
MARGIN_QUANTILE = 0.9

Sample = tuple[tuple[float, ...], float]
"""The row of a size, and seconds."""


@dataclass(frozen=True)
class PassSize:
    """What a pass computes: new tokens of prompts, of decoding one of each sequence, and what they attend to."""

    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    """Tokens that each of them attends to, in all."""
    sequences: int = 0
    """That decode."""
    context: int = 0
    """Tokens that they attend to."""

    def with_prompt(self, past: int, new: int) -> PassSize:
        """This and more tokens of a prompt."""
        pairs = self.prompt_pairs + new * (past + new / 2)
        return PassSize(self.prompt_tokens + new, pairs, self.sequences, self.context)

    def row(self) -> tuple[float, ...]:
        # What a pass takes in any case is more with many rows than with few.
        reads = float(self.prompt_tokens > 0)
        return (1.0, reads, self.prompt_tokens, self.prompt_pairs, self.sequences, self.context)


class PassTimes:
    """Seconds of passes by their size: a sum over what is in it, each share at least 0, that fits the latest best.

    Passes of up to `few` tokens have shares of their own: they may go another way through the layers.
    """

    def __init__(self, few: float = math.inf) -> None:
        self.few = few
        # Passes of decoding alone would soon be all there is.
        self._samples: dict[tuple[bool, bool], deque[Sample]] = {
            (many, reads): deque(maxlen=SAMPLES) for many in (False, True) for reads in (False, True)
        }
        self._ratios: deque[float] = deque(maxlen=RATIOS)
        self._weights: dict[bool, np.ndarray] = {}
        self._most_prompt = 0
        self._stale = {False, True}

    def add(self, size: PassSize, seconds: float) -> None:
        """A pass was measured."""
        if size.prompt_tokens and (expected := self.seconds(size)):
            self._ratios.append(seconds / expected)
        many = self._many(size)
        self._samples[many, size.prompt_tokens > 0].append((size.row(), max(seconds, 1e-6)))
        self._most_prompt = max(self._most_prompt, size.prompt_tokens)
        self._stale.add(many)

    def seconds(self, size: PassSize) -> float:
        """0 where nothing was measured yet."""
        many = self._many(size)
        # Until one was measured, those of many are like those of few, and the other way round.
        weights = next((found for kind in (many, not many) if (found := self._fitted(kind)) is not None), None)
        return 0.0 if weights is None else float(np.dot(weights, size.row()))

    @property
    def margin(self) -> float:
        """By how much passes with prompts often exceed what was predicted."""
        return float(np.clip(np.quantile(self._ratios, MARGIN_QUANTILE), 1.0, 2.0)) if self._ratios else 1.0

    @property
    def trusted_prompt(self) -> int:
        """New prompt tokens up to which predictions are trusted."""
        return max(FIRST_CHUNK, int(GROWTH * self._most_prompt))

    def _many(self, size: PassSize) -> bool:
        return size.prompt_tokens > 0 and size.prompt_tokens + size.sequences > self.few

    def _fitted(self, many: bool) -> np.ndarray | None:
        if many in self._stale:
            self._stale.remove(many)
            self._fit(many)
        return self._weights.get(many)

    def _fit(self, many: bool) -> None:
        samples = [sample for reads in (False, True) for sample in self._samples[many, reads]]
        if not samples:
            return
        rows = np.array([row for row, _ in samples])
        seconds = np.array([second for _, second in samples])
        # Relative errors count, and columns of like size are what the solver is good at.
        rows = rows / seconds[:, None]
        scale = np.maximum(rows.max(axis=0), 1e-12)
        weights, _ = nnls(rows / scale, np.ones(len(rows)))
        self._weights[many] = weights / scale
