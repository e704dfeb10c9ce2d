"""Prompt lookup: what followed the latest tokens where they stood before is a guess at what comes next."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

NGRAM = 16
"""Latest tokens that must be found again at most: of more, what follows is more likely to come."""
CAPACITY = 256


class TokenLookup:
    """Tokens of one sequence, and a guess at those that come next, of which up to `most` are asked for.

    It is what followed the most of the latest tokens, up to `ngram`, that stood together before; of several such places
    what followed the first. As long as it comes true, no other place is looked for.
    """

    def __init__(self, most: int, ngram: int = NGRAM):
        self._most, self._ngram = most, ngram
        self._memory = np.empty(CAPACITY, dtype=np.int64)
        self._source = 0
        self.length = 0
        self.matched = 0
        """So many of the latest tokens stood before what is guessed; 0 where nothing is."""

    def add(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """More tokens have come: how many of them were guessed, and whether the one behind those was guessed wrong."""
        first, last = self.length, self.length + len(tokens)
        if last > len(self._memory):
            self._memory = np.concatenate([self._memory[:first], np.empty(last, dtype=np.int64)])
        self._memory[first:last] = tokens
        self.length = last
        right, missed = 0, False
        if self.matched:
            guess = self._memory[self._source : min(self._source + len(tokens), first)]
            wrong = np.flatnonzero(guess != self._memory[first : first + len(guess)])
            missed = len(wrong) > 0
            right = int(wrong[0]) if missed else len(guess)
        if right == len(tokens) and self._source + right + self._most <= last:
            self._source += right
            self.matched = min(self.matched + right, self._ngram) if self.matched else 0
        else:
            self._look()
        return right, missed

    def guess(self, most: int, stops: Collection[int] = ()) -> list[int]:
        """What may come next, up to so many tokens, before the first of the `stops`."""
        if not self.matched:
            return []
        found: list[int] = self._memory[self._source : min(self._source + most, self.length)].tolist()
        return next((found[:at] for at, token in enumerate(found) if token in stops), found)

    def _look(self) -> None:
        ids = self._memory[: self.length]
        self.matched = 0
        if len(ids) < 2:
            return
        # Places behind which as many tokens are as the latest ones.
        longer = np.flatnonzero(ids[:-1] == ids[-1]) + 1
        while len(longer):
            places = longer
            self.matched += 1
            if self.matched == self._ngram:
                break
            earlier = places[places > self.matched]
            longer = earlier[ids[earlier - 1 - self.matched] == ids[-1 - self.matched]]
        if self.matched:
            self._source = int(places[0])
